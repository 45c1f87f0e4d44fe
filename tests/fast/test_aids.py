"""What only serves speed may fail: answers stay, and the engine goes on."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from tests.fast.toy_workloads import (
    MORE_PROPOSERS,
    PROPOSERS,
    make_engine,
    make_method,
    sources_of,
)
from tests.tiers import cases
from vllm_treespec.aids import Aid
from vllm_treespec.schedule.cost import CostModel
from vllm_treespec.schedule.scheduler import AdaptiveScheduler
from vllm_treespec.step.decoder import RanksDiffer
from vllm_treespec.testing.fake_engine import FakeEngine
from vllm_treespec.testing.fake_scheduler import Habits, Request
from vllm_treespec.testing.toy_models import Language
from vllm_treespec.testing.workloads import check_greedy, workload


def failing(function: Callable[..., Any], num_working: int) -> Any:
    """The same function, which fails after so many calls."""
    left = num_working

    def call(*args: Any, **options: Any) -> Any:
        nonlocal left
        left -= 1
        if left < 0:
            raise ZeroDivisionError("as told")
        return function(*args, **options)

    return call


def engine_with_all(
    share: Callable[[list[float]], list[float]] = lambda seconds: seconds,
    rank: int = 0,
) -> FakeEngine:
    """An engine whose schedule adapts, rests, and prunes trees of an index and a model.

    The clocks of ranks differ.
    """
    proposers = [(PROPOSERS | MORE_PROPOSERS)[n]() for n in ("hybrid", "hybrid_alone")]
    make_schedule = partial(AdaptiveScheduler, max_trees=16, share=share)
    method = make_method(proposers, "coupled_draw", [0, 0], make_schedule=make_schedule)
    language = Language(0)
    sources = sources_of("hybrid", language)
    habits = Habits(max_model_len=200, num_blocks=200)
    engine = FakeEngine(language, method, sources, habits, rank=rank)
    engine.decoder.clock.clock = lambda: (1 + rank) * float(engine.decoder.step)
    return engine


def part(engine: FakeEngine, name: str) -> Any:
    """The part of an engine that stands for a feature."""
    decoder = engine.decoder
    return {
        "schedule": decoder.method.schedule,
        "clock": decoder.clock,
        "stats": decoder.stats,
    }[name]


@pytest.mark.parametrize(
    ("name", "function"),
    [
        ("schedule", "plan"),
        ("schedule", "observe"),
        ("schedule", "_rest_steps"),
        ("schedule", "forget"),
        ("clock", "_result"),
        ("clock", "_goes_on"),
        ("stats", "count_scored"),
    ],
)
@pytest.mark.usefixtures("aids_may_fail")
def test_a_part_that_fails_changes_no_answer(
    name: str, function: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Red when an error of a schedule or its helpers ends an engine, or is not said."""
    engine = engine_with_all()
    owner = part(engine, name)
    setattr(owner, function, failing(getattr(owner, function), num_working=1))
    check_once(engine, caplog, "every step is plain")
    assert all(index is None for _, index in engine.drawn[-10:])
    modes = engine.decoder.stats.as_dict()["modes"]
    assert sum(modes.values()) >= engine.decoder.step - 1


@pytest.mark.parametrize(
    "counter",
    cases(
        ["seconds", "modes", "mode_seconds", "node_counts", "accepted", "source_nodes"],
        quick=["seconds", "accepted"],
    ),
)
@pytest.mark.usefixtures("aids_may_fail")
def test_a_counter_that_fails_changes_no_answer(
    counter: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Red when an error of a count ends an engine, or draws other trees."""
    engine, other = make_engine("hybrid", Habits()), make_engine("hybrid", Habits())
    setattr(engine.decoder.stats._totals, counter, None)
    check_once(engine, caplog, "metrics of draft trees stand still")
    check_greedy(other, workload(0))
    assert engine.drawn == other.drawn


def check_once(engine: FakeEngine, caplog: pytest.LogCaptureFixture, says: str) -> None:
    """Run requests to their end; one warning with a traceback must be logged."""
    with caplog.at_level(logging.WARNING):
        check_greedy(engine, workload(0))
    (record,) = caplog.records
    assert f"failed and is off until the next start: {says}. " in record.message
    assert record.exc_info is not None


@pytest.mark.parametrize("cause", ["observe", "draft_costs"])
@pytest.mark.usefixtures("aids_may_fail")
def test_ranks_switch_off_together(cause: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Red when a rank waits for times that rank 0 does not hand out, or draws alone.

    What fails depends on times.
    """
    told: deque[list[float]] = deque()

    def first(seconds: list[float]) -> list[float]:
        told.append(list(seconds))
        return seconds

    real, drawn, handed_out = getattr(CostModel, cause), [], 0
    for rank, share in enumerate((first, lambda _: told.popleft())):
        monkeypatch.setattr(CostModel, cause, failing(real, num_working=16))
        engine = engine_with_all(share, rank)
        check_greedy(engine, [Request(str(n), [1, 2, n], 150) for n in range(2)])
        assert not engine.decoder.method.schedule.aid.is_on
        drawn.append(engine.drawn)
        handed_out = handed_out or len(told)
    assert handed_out > 1
    assert not told, "rank 0 handed out more"
    assert drawn[0] == drawn[1]
    assert {index for _, index in drawn[0][:-10]} == {0, None}


@pytest.mark.parametrize("error", [MemoryError, RanksDiffer])
@pytest.mark.usefixtures("aids_may_fail")
def test_what_may_come_on_one_rank_alone_ends_it(error: type[BaseException]) -> None:
    """Red when a rank without memory or connection draws trees of its own."""

    def fail() -> None:
        raise error

    with pytest.raises(error):
        Aid("It", "nothing changes").run(None, fail)


def test_tests_see_errors_of_aids() -> None:
    """Red when a wrong schedule passes the tests, as its aid hides it."""
    engine = engine_with_all()
    schedule = part(engine, "schedule")
    schedule.observe = failing(schedule.observe, num_working=1)
    with pytest.raises(ZeroDivisionError):
        check_greedy(engine, workload(0))
