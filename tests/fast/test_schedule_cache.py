"""The file that keeps what an adaptive scheduler learned."""

from __future__ import annotations

import json
import logging
import math
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="the file lies in vLLM's cache")

from tests.fast.scheduled_trees import HEAD, serve
from tests.fast.small_engine import engine_config
from vllm_treespec.engine import drafter, schedule_cache
from vllm_treespec.engine.schedule_cache import (
    FIRST_SECONDS,
    MOST_SECONDS,
    ScheduleCache,
    origin_of,
)
from vllm_treespec.schedule.cost import Terms
from vllm_treespec.schedule.saved import SchedulerState, state_of
from vllm_treespec.schedule.scheduler import AdaptiveScheduler
from vllm_treespec.step.decoder import RanksDiffer

ORIGIN = {"target": "t", "device": "cpu"}


class Rank:
    """A tensor-parallel rank; what rank 0 hands out stands in a list."""

    def __init__(self, is_first_rank: bool, told: list[Any]) -> None:
        """Take the list that the ranks share."""
        self.is_first_rank = is_first_rank
        self.told = told

    def broadcast_object(self, value: Any) -> Any:
        """Hand out, or take."""
        if self.is_first_rank:
            self.told.append(value)
        return self.told[-1]


class Clock:
    """Seconds that pass when told."""

    now = 0.0

    def __call__(self) -> float:
        """The time."""
        return self.now


@pytest.fixture(autouse=True)
def rank(monkeypatch: pytest.MonkeyPatch) -> Rank:
    """The only rank, until a test says otherwise."""
    only = Rank(True, [])
    monkeypatch.setattr(schedule_cache, "get_tp_group", lambda: only)
    return only


def start(
    folder: Path, origin: dict[str, str] | None = None
) -> tuple[AdaptiveScheduler, ScheduleCache, Clock]:
    """A scheduler that just started, its cache and its clock."""
    scheduler, clock = AdaptiveScheduler(HEAD, 64), Clock()
    cache = ScheduleCache(folder, origin or ORIGIN, scheduler, clock)
    cache.load()
    cache.save_if_due()
    return scheduler, cache, clock


def kept(folder: Path) -> SchedulerState:
    """Let an engine run, and keep what it learned."""
    scheduler, cache, clock = start(folder)
    serve(scheduler, 100, range(4))
    clock.now = FIRST_SECONDS
    cache.save_if_due()
    return state_of(scheduler)


def test_the_next_start_knows_what_the_last_one_learned(tmp_path: Path) -> None:
    """Red when something is lost on the way, or what belongs elsewhere is read."""
    learned = kept(tmp_path)
    assert learned.costs["greedy"][4]
    assert state_of(start(tmp_path)[0]) == learned
    for origin in ({**ORIGIN, "target": "other"}, {**ORIGIN, "threads": "8"}):
        assert not start(tmp_path, origin)[0].cost.fits


def test_all_ranks_begin_alike(
    tmp_path: Path, rank: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Red when a rank reads a file of its own, or more than one of them write."""
    learned = kept(tmp_path)
    first = start(tmp_path)[0]
    second_rank = Rank(False, rank.told)
    monkeypatch.setattr(schedule_cache, "get_tp_group", lambda: second_rank)
    second, cache, clock = start(tmp_path / "elsewhere")
    assert state_of(second) == state_of(first) == learned
    clock.now = MOST_SECONDS
    cache.save_if_due()
    assert not (tmp_path / "elsewhere").exists()


def test_it_is_written_now_and_then(tmp_path: Path) -> None:
    """Red when each step writes, or nothing is written for long."""
    scheduler, cache, clock = start(tmp_path)
    serve(scheduler, 20)
    written = []
    for second in range(2000):
        clock.now = float(second)
        cache.save_if_due()
        if cache.file.exists():
            written.append(second)
            cache.file.unlink()
    assert written[:4] == [10, 30, 70, 150]
    assert written[-1] - written[-2] == MOST_SECONDS


def changed(**learned: Any) -> Callable[[Path], object]:
    """Put something else in place of what was learned."""

    def change(file: Path) -> None:
        whole = json.loads(file.read_text())
        whole["state"] |= learned
        file.write_text(json.dumps(whole))

    return change


def text(content: str) -> Callable[[Path], object]:
    """Write something else into the file."""
    return lambda file: file.write_text(content)


def is_a_folder(file: Path) -> None:
    """Put a folder in place of the file."""
    file.unlink()
    file.mkdir()


def is_a_pipe(file: Path) -> None:
    """Put a pipe in place of the file, which nobody writes to."""
    file.unlink()
    os.mkfifo(file)


def costs(seconds: object, size: str = "4", **factors: float) -> dict[str, object]:
    """Costs of steps of one batch size."""
    one = dict.fromkeys(Terms._fields[1:], 1.0) | factors
    return {"greedy": {size: {"seconds": seconds, "factors": one}}, "sampled": {}}


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (text(""), "ValidationError"),
        (text("{}"), "validation errors"),
        (text('{"origin": {}, "state": 3}'), "validation error"),
        (text("\x00"), "ValidationError"),
        (text("[" * 100_000), "ValidationError"),
        (lambda file: file.write_bytes(file.read_bytes()[:-9]), "ValidationError"),
        (lambda file: file.write_bytes(b"\xff\xfe"), "ValidationError"),
        (lambda file: os.truncate(file, 2**40), "ValidationError"),
        (is_a_folder, "no schedule's file"),
        (is_a_pipe, "no schedule's file"),
        (
            lambda file: file.write_text(file.read_text().replace('"cpu"', '"tpu"')),
            "another engine's file",
        ),
        (
            changed(costs={"greedy": {"4": {"seconds": 1, "factors": {}}}}),
            "KeyError: 'rows'",
        ),
        (changed(accepted={"greedy": {"no such tree": 1}}), "'no such tree'"),
        (changed(costs=costs(-1)), "ValidationError"),
        (changed(costs=costs(0)), "ValidationError"),
        (changed(costs=costs(math.nan)), "ValidationError"),
        (changed(costs=costs(math.inf)), "ValidationError"),
        (changed(costs=costs("long")), "ValidationError"),
        (changed(costs=costs(1, size="0")), "ValidationError"),
        (changed(costs=costs(1, rows=-1.0)), "ValidationError"),
        (changed(costs={"warm": {}}), "ValidationError"),
        (changed(drafts={"greedy": {"4": [1, 1]}}), "ValidationError"),
        (changed(target_forwards={"-1": 1}), "ValidationError"),
        (changed(kept={"greedy": {"index": math.inf}}), "ValidationError"),
        (changed(kept={"greedy": {"text": 1}}), "ValidationError"),
    ],
)
def test_a_broken_file_is_measured_anew(
    damage: Callable[[Path], object],
    says: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Red when an engine does not start for a broken file, or begins with a part."""
    kept(tmp_path)
    (file,) = tmp_path.iterdir()
    damage(file)
    with caplog.at_level(logging.WARNING):
        scheduler, *_ = start(tmp_path)
    assert state_of(scheduler) == state_of(AdaptiveScheduler(HEAD, 64))
    (line,) = caplog.messages
    assert f"{file} cannot be read, so the schedule measures anew (" in line
    assert says in line


@pytest.mark.usefixtures("aids_may_fail")
@pytest.mark.parametrize("function", ["state_of", "restore"])
def test_a_cache_that_fails_is_left_out(
    function: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Red when an error in reading or writing the cache ends an engine."""
    kept(tmp_path)

    def fail(*_: object) -> None:
        raise TypeError("as told")

    monkeypatch.setattr(schedule_cache, function, fail)
    scheduler, cache, clock = start(tmp_path)
    assert bool(scheduler.cost.fits) == (function == "state_of")
    serve(scheduler, 20)
    for clock.now in (20.0, 100.0, 1000.0):
        cache.save_if_due()
    (record,) = (r for r in caplog.records if r.levelno == logging.WARNING)
    assert "The schedule's cache failed" in record.message
    assert record.exc_info is not None


def test_what_a_failed_schedule_learned_is_not_kept(tmp_path: Path) -> None:
    """Red when the next start begins with what made this one's schedule fail."""
    scheduler, cache, clock = start(tmp_path)
    serve(scheduler, 20)
    scheduler.aid.is_on = False
    clock.now = FIRST_SECONDS
    cache.save_if_due()
    assert not cache.file.exists()


def test_writing_changes_nothing_that_was_learned(tmp_path: Path) -> None:
    """Red when rank 0, which alone writes, learns otherwise than the others."""
    scheduler, cache, clock = start(tmp_path)
    serve(scheduler, 100)
    before = pickle.dumps((scheduler.cost, scheduler.values, scheduler.calibration))
    clock.now = FIRST_SECONDS
    cache.save_if_due()
    assert cache.file.exists()
    after = pickle.dumps((scheduler.cost, scheduler.values, scheduler.calibration))
    assert after == before


def test_ranks_without_a_connection_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Red when a rank goes on without its schedule, where others have theirs."""

    def broken() -> Rank:
        raise RuntimeError("Connection closed by peer")

    monkeypatch.setattr(drafter, "get_tp_group", broken)
    with pytest.raises(RanksDiffer, match="Connection closed by peer"):
        drafter.first_rank_values([1.0])


def test_a_folder_that_cannot_be_written_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Red when an engine stops for its cache, or says nothing, or says it each time."""
    (tmp_path / "file").write_text("")
    scheduler, cache, clock = start(tmp_path / "file" / "folder")
    serve(scheduler, 20)
    for clock.now in (20.0, 100.0, 1000.0):
        cache.save_if_due()
    assert caplog.text.count('set "schedule_cache" to false') == 1


def test_an_origin_holds_what_times_depend_on() -> None:
    """Red when engines of different speed share a file."""
    trees = SimpleNamespace(trees=HEAD)

    def origin(**changes: Any) -> dict[str, str]:
        spec = {"method": "suffix_tree", "num_drafts": changes.pop("num_drafts", 8)}
        config = engine_config(spec)
        for name, value in changes.items():
            setattr(config.model_config, name, value)
        return origin_of(config, trees)  # type: ignore[arg-type]

    plain = origin()
    assert plain == origin()
    eager = engine_config({"method": "suffix_tree"}).model_config.enforce_eager
    assert plain != origin(num_drafts=4)
    assert plain != origin(model="other")
    assert plain != origin(enforce_eager=not eager)
