"""Forwards that are timed when an engine starts, and what follows from them."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace

import pytest
import torch

from tests.fast.test_cost import TIMED
from vllm_treespec.schedule.forward_times import (
    MOST_RUNS,
    ROWS,
    TARGET_SECONDS,
    ForwardTimes,
    at,
    time_rows,
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


def test_rows_cost_something_on_a_machine_that_was_slow_at_first() -> None:
    """Red when rows are thought to be free where small forwards were disturbed."""
    clean, _ = Clock(0.001).time()
    small = [run for run in range(200) if run < 2 or (run - 2) % len(ROWS) < 2]
    disturbed, _ = Clock(0.001, slow_runs=small).time()
    assert disturbed[8] == pytest.approx(min(3 * clean[8], clean[16]))
    for batch_size in (1, 8):
        extra = ForwardTimes(disturbed).extra(batch_size, 48)
        assert extra == pytest.approx(0.048, rel=0.25)


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
