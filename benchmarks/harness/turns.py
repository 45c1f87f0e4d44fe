"""Engines that are in memory at the same time and measure in turn, cell by cell.

The speed of a machine changes within minutes. So each cell is measured by all engines,
one right after the other, before the next cell comes.
"""

from __future__ import annotations

import threading
import zlib
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from rich.progress import Progress

from benchmarks.harness.options import console
from benchmarks.harness.plan import Engine, Failures, Plan, Runner, progress_columns
from vllm_treespec.tools.launch import READY, EngineError, Event
from vllm_treespec.tools.sides import Cell, CellResult, run_side

# A cell of a side in a round.
Turn = tuple[int, Engine, Cell]


class Turns:
    """Whose turn it is: nobody's until all engines have started, one by one."""

    def __init__(self, names: Sequence[str]) -> None:
        """Take the engines' names in the order of their turns."""
        self.left = deque(names)
        self.starting = list(dict.fromkeys(names))
        self.stopped = False
        self.changed = threading.Condition()

    def wait_to_start(self, name: str) -> None:
        """Wait until the engines before this one have started.

        Raises:
            EngineError: when no more engines start.

        """
        with self.changed:
            self.changed.wait_for(lambda: self.stopped or self.starting[0] == name)
            self._check_stopped()

    def _check_stopped(self) -> None:
        if self.stopped:
            raise EngineError("stopped")

    def _has_started(self, name: str) -> None:
        if name in self.starting:
            self.starting.remove(name)
            self.changed.notify_all()

    def wait(self, name: str) -> None:
        """Note that an engine has started, and wait for its turn.

        Raises:
            EngineError: when no more turns are given.

        """
        with self.changed:
            self._has_started(name)
            self.changed.wait_for(lambda: self.stopped or self._is_turn(name))
            self._check_stopped()

    def _is_turn(self, name: str) -> bool:
        return not self.starting and self.left[0] == name

    def end(self) -> None:
        """Pass the turn on."""
        with self.changed:
            self.left.popleft()
            self.changed.notify_all()

    def stop(self) -> None:
        """Give no more turns."""
        with self.changed:
            self.stopped = True
            self.changed.notify_all()

    def leave(self, name: str) -> None:
        """Take an engine that has ended out."""
        with self.changed:
            self._has_started(name)
            self.left = deque(other for other in self.left if other != name)
            self.changed.notify_all()


def execute_in_turns(
    plan: Plan,
    after_engines: Callable[[Failures], None],
    runner: Runner = run_side,
    *,
    together: int,
) -> Failures:
    """Measure what is left, with ``together`` engines in memory at a time.

    An engine measures all its rounds, one round of all engines after the other.
    Returns why engines failed, by side; the others go on.
    """
    failed: Failures = {}
    with Progress(*progress_columns(), console=console) as bar:
        task = bar.add_task("", total=sum(len(job.cells) for _, job in plan.todo()))
        for first in range(0, len(plan.engines), together):
            engines = plan.engines[first : first + together]
            names = " ".join(engine.side.name for engine in engines)
            bar.update(task, description=names)
            failed |= measure_together(plan, engines, lambda: bar.advance(task), runner)
            after_engines(failed)
    return failed


def measure_together(
    plan: Plan, engines: Sequence[Engine], advance: Callable[[], None], runner: Runner
) -> Failures:
    """Measure what some engines have left, each in a process of its own."""
    turns = turns_of(plan, engines)
    order = Turns([engine.side.name for _, engine, _ in turns])
    failed: Failures = {}

    def measure(engine: Engine) -> None:
        mine = [turn for turn in turns if turn[1] is engine]
        try:
            run_in_turns(plan, mine, order, advance, runner)
        except EngineError as error:
            failed[engine.side.name] = str(error)
            console.print(f"failed: {error}", markup=False)
        finally:
            order.leave(engine.side.name)

    with ThreadPoolExecutor(len(engines)) as pool:
        running = [pool.submit(measure, engine) for engine in engines]
        try:
            for engine_run in running:
                engine_run.result()
        except BaseException:
            order.stop()
            raise
    return failed


def turns_of(plan: Plan, engines: Sequence[Engine]) -> list[Turn]:
    """What some engines have left to measure: round by round, cell by cell."""
    cells = list(dict.fromkeys(cell for engine in engines for cell in engine.cells))
    return [
        (round_, engine, cell)
        for round_ in range(plan.rounds)
        for cell in cells
        for engine in engines
        if round_ < engine.rounds
        and cell in engine.cells
        and not plan.file(engine.side, cell, round_).is_file()
    ]


def run_in_turns(
    plan: Plan,
    turns: Sequence[Turn],
    order: Turns,
    advance: Callable[[], None],
    runner: Runner,
) -> None:
    """Run one engine until it has measured its cells; EngineError when it fails."""
    if not turns:
        return
    round_, engine, cell = turns[0]
    name = engine.side.name
    job = plan.job.model_copy(
        update={
            "side": engine.side,
            "cells": [cell for _, _, cell in turns],
            "seed": zlib.crc32(f"{name}.{cell.name}.{round_}".encode()),
            "timeout_s": plan.job.timeout_s * len(order.left),
            "in_turns": True,
        }
    )
    rounds = deque(round_ for round_, _, _ in turns)

    def take(event: Event) -> None:
        if event["event"] == READY:
            order.wait(name)
        elif event["event"] == "cell":
            result = CellResult.model_validate(event["result"])
            plan.keep(job, rounds.popleft(), result)
            advance()
            order.end()

    order.wait_to_start(name)
    runner(job, plan.out / "logs" / f"{name}.log", take)
