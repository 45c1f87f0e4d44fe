"""Forwards that are timed when an engine starts, and what follows from them."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace

import pytest
import torch

from tests.fast.test_measured_schedule import HEAD, INDEX, Machine, Run, Tree
from vllm_treespec.schedule.costs import StepCosts
from vllm_treespec.schedule.experience import Experience, experience_of, recall
from vllm_treespec.schedule.forward_times import (
    MORE_ROWS,
    MOST_RUNS,
    NOT_TIMED,
    ROWS,
    TARGET_SECONDS,
    ForwardTimes,
    at,
    time_rows,
)
from vllm_treespec.schedule.measured import MeasuredSchedule
from vllm_treespec.schedule.options import Option
from vllm_treespec.schedule.prices import DraftCosts, DraftParts, guessed_parts

TIMED = ForwardTimes(
    target={1: 0.10, 8: 0.10, 16: 0.10, 32: 0.16, 64: 0.32},
    draft={1: 0.02, 8: 0.02, 16: 0.03, 32: 0.04, 64: 0.08},
)


class Clock:
    """A device on which forwards take known times."""

    def __init__(self, seconds_of_a_row: float, slow_runs: Sequence[int] = ()) -> None:
        """Take the runs, by their number, that take three times as long."""
        self.now, self.each, self.slow_runs = 0.0, seconds_of_a_row, slow_runs
        self.rows: list[int] = []

    def run(self, num_rows: int) -> None:
        """Run a forward."""
        slow = len(self.rows) in self.slow_runs
        self.now += self.each * num_rows * (3 if slow else 1)
        self.rows.append(num_rows)

    def time(
        self, most_rows: int = 1000, rank_0: Sequence[list[float]] = ()
    ) -> tuple[dict[int, float], list[list[float]]]:
        """Time forwards, and what was handed out: rank 0's times, if there is one."""
        told: list[list[float]] = []

        def share(seconds: list[float]) -> list[float]:
            told.append(rank_0[len(told)] if rank_0 else seconds)
            return told[-1]

        found = time_rows(
            self.run, share, most_rows, TARGET_SECONDS, clock=lambda: self.now
        )
        return found, told


def test_between_timed_rows_is_a_line() -> None:
    """Red when a batch of other rows than the timed ones has another time."""
    assert at(TIMED.target, 1) == 0.10
    assert at(TIMED.target, 12) == pytest.approx(0.10)
    assert at(TIMED.target, 24) == pytest.approx(0.13)
    assert at(TIMED.target, 64) == pytest.approx(0.32)
    assert at(TIMED.target, 128) == pytest.approx(0.64)
    falling = {1: 0.2, 8: 0.1, 16: 0.3}
    assert at(falling, 4) == 0.2, "more rows take no less"


def test_a_slow_run_is_no_time() -> None:
    """Red when one disturbed forward at the start makes all drafts dear."""
    clean, _ = Clock(0.0001).time()
    disturbed, _ = Clock(0.0001, slow_runs=[0, 3, 7, 9]).time()
    assert disturbed == pytest.approx(clean)
    assert clean == pytest.approx({rows: 0.0001 * rows for rows in ROWS})


def test_a_machine_that_was_slow_at_first_has_prices() -> None:
    """Red when rows are thought to be free where small forwards were disturbed."""
    clean, _ = Clock(0.001).time()
    small = [run for run in range(200) if run < 2 or (run - 2) % len(ROWS) < 2]
    disturbed, _ = Clock(0.001, slow_runs=small).time()
    assert disturbed[8] == pytest.approx(min(3 * clean[8], clean[16]))
    for batch_size in (1, 8):
        price = ForwardTimes(disturbed).target_row(batch_size)
        assert price == pytest.approx(0.001, rel=0.25)


def test_the_start_takes_bounded_time() -> None:
    """Red when a large target's forwards are all timed, however long they take."""
    clock = Clock(0.0001)
    clock.time()
    assert len(clock.rows) == 2 + MOST_RUNS * len(ROWS)
    slow = Clock(0.4)
    assert slow.time()[0] == {}
    assert slow.rows == [1, 1]


def test_no_forward_has_more_rows_than_the_engine_takes() -> None:
    """Red when an engine with a small token budget fails at its start."""
    found, _ = Clock(0.0001).time(most_rows=16)
    assert list(found) == [1, 8, 16]


def test_ranks_have_rank_0_s_times() -> None:
    """Red when a rank times other forwards than rank 0, which it must run with."""
    first, told = Clock(0.001).time()
    for seconds_of_a_row in (0.0001, 0.3):
        found, told_again = Clock(seconds_of_a_row).time(rank_0=told)
        assert found == first
        assert told_again == told


def test_prices_begin_with_timed_forwards() -> None:
    """Red when what is guessed of a small target is thought of every one."""
    plain = 0.11
    prices = DraftCosts(TIMED).prices(0, 4, plain, ())
    each = (0.16 + 0.16 * 20 / 32 - 0.10) / MORE_ROWS
    assert prices.draft == pytest.approx(each * 4 / plain)
    assert prices.level == pytest.approx(0.02 * 4 / plain)
    assert DraftCosts(TIMED).caught_up_seconds(0, 4, plain) == pytest.approx(0.04 / 32)
    guessed = guessed_parts(4, plain)
    assert prices.first == pytest.approx(guessed.first * 4 / plain)
    untimed = DraftCosts().prices(0, 4, plain, ())
    assert untimed.draft == pytest.approx(guessed.each * 4 / plain)
    assert untimed.level == pytest.approx(guessed.level * 4 / plain)


def test_no_draft_costs_less_than_half_a_timed_row() -> None:
    """Red when two disturbed steps make rows free, and trees as large as can be."""
    timed, untimed = DraftCosts(TIMED), DraftCosts()
    for step, (num_drafts, seconds) in enumerate([(10, 0.5), (31, 0.2)] * 4):
        counts = DraftParts.of_step(0, num_drafts, 0, True)
        for costs in (timed, untimed):
            costs.add(step, 8, counts, seconds, 0.11)
    row = TIMED.target_row(8)
    assert row is not None
    assert timed.prices(8, 8, 0.11, ()).draft == pytest.approx(row / 2 * 8 / 0.11)
    assert untimed.prices(8, 8, 0.11, ()).draft < row / 2 * 8 / 0.11


def test_a_head_s_levels_are_guessed() -> None:
    """Red when the levels of a source that was not timed cost nothing."""
    prices = DraftCosts(ForwardTimes(TIMED.target)).prices(0, 1, 0.1, ())
    assert prices.level == pytest.approx(guessed_parts(1, 0.1).level / 0.1)


def test_trees_take_at_least_their_forwards() -> None:
    """Red when a tree that was never drawn is thought to be free.

    Trees whose drafts are weighed may be smaller, so nothing is said of them.
    """
    plain, whole = Option(None, 0, 0.0), Option(0, 15, 2.0, num_levels=3)
    weighed = Option(1, 15, 2.0, weighs_drafts=True, num_levels=3)
    costs = StepCosts([plain, whole, weighed])
    assert costs.extra_seconds(2, 0, 0.1) == 0
    costs.begin_with(TIMED)
    assert costs.extra_seconds(2, 0, 0.1) == pytest.approx(0.06 + 3 * 0.02)
    assert costs.extra_seconds(2, 1, 0.1) == 0


def test_timed_forwards_are_kept() -> None:
    """Red when the next start times again what is known, or another machine's stay."""
    schedule = MeasuredSchedule([Tree(16, 12, 16)], 64)
    schedule.times.begin_with(TIMED)
    again = MeasuredSchedule([Tree(16, 12, 16)], 64)
    as_text = experience_of(schedule).model_dump_json()
    recall(again, Experience.model_validate_json(as_text))
    assert again.times.forwards == TIMED
    for costs in again.times.costs_by_kind.values():
        assert costs.drafts.forwards == TIMED
        costs.recalled[1, None] = 0.1
        costs.times[1] = {}
        for _ in range(6):
            costs.add(1, None, 0.0, 1.0)
        assert costs.is_other_machine
        assert costs.drafts.forwards == NOT_TIMED
        assert again.times.forwards == NOT_TIMED, "the next start would recall them"


def test_what_is_recalled_of_drafts_stays() -> None:
    """Red when a start that times forwards forgets what steps with drafts had shown."""
    costs = StepCosts([Option(None, 0, 0.0)])
    parts = DraftParts(0.01, 0.02, 0.003, 0.0001, 0.002)
    costs.drafts.recall(4, 0.1, parts)
    costs.begin_with(TIMED)
    assert costs.prices(4, 0.1).draft == pytest.approx(parts.each * 4 / 0.1)


def test_timed_forwards_shorten_the_search() -> None:
    """Red when a schedule makes nothing of what forwards take.

    What the host does is not in them.
    """
    shares = {}
    for timed in (False, True):
        shares[timed] = 0.0
        for seed in range(48):
            trees = HEAD if seed % 2 else INDEX
            machine = Machine(seed, trees)
            schedule = MeasuredSchedule(trees, 64)
            if timed:
                schedule.times.begin_with(forwards_of(machine))
            run = Run(machine, schedule)
            run.steps(60, (1, 2, 4, 8, 16, 32)[seed % 6])
            shares[timed] += run.share / 48
    assert shares[True] > shares[False] + 0.01


def forwards_of(machine: Machine) -> ForwardTimes:
    """What a simulated machine's forwards take, where trees have no host's work."""
    target = {rows: 1 + machine.row * max(0, rows - machine.free_rows) for rows in ROWS}
    return ForwardTimes(target, dict.fromkeys(ROWS, machine.level))


class WarmWorker:
    """vLLM's worker, warmed up; our runner without anything."""

    model_runner = SimpleNamespace(parallel_config=SimpleNamespace(rank=1))

    def compile_or_warm_up_model(self) -> str:
        """Warm up."""
        return "warm"


@pytest.mark.usefixtures("aids_may_fail")
@pytest.mark.parametrize("error", [ValueError, torch.OutOfMemoryError])
def test_timing_that_fails_ends_no_start(
    error: type[Exception],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Red when an engine does not start as its forwards cannot be timed.

    A device without memory ends it: other ranks would wait in their forwards.
    """
    pytest.importorskip("vllm", reason="needs vLLM")
    from vllm_treespec.engine import worker

    def fail(runner: object) -> None:
        raise error("as told")

    class Worker(worker.TreeWorkerMixin, WarmWorker):  # type: ignore[misc]
        """Ours."""

    monkeypatch.setattr(worker, "time_forwards", fail)
    if error is torch.OutOfMemoryError:
        with pytest.raises(torch.OutOfMemoryError):
            Worker().compile_or_warm_up_model()
        return
    assert Worker().compile_or_warm_up_model() == "warm"
    (line,) = (said for said in caplog.messages if "Timing forwards" in said)
    assert "Timing forwards failed" in line
    assert "the schedule begins with guesses" in line
