"""Engines that are in memory at the same time and measure in turn, cell by cell.

The speed of a machine changes within minutes. So each cell is measured by all engines,
one right after the other, before the next cell comes.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, closing

from rich.progress import Progress

from benchmarks.harness.options import console
from benchmarks.harness.plan import Engine, Failures, Plan, progress_columns
from vllm_treespec.tools.launch import EngineError, Event, turn
from vllm_treespec.tools.sides import Cell, Job, Start, results_of, side_events

# A cell of a side in a round.
Turn = tuple[int, Engine, Cell]


def execute_in_turns(
    plan: Plan,
    after_engines: Callable[[Failures], None],
    *,
    together: int,
    start: Start = side_events,
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
            failed |= measure_together(plan, engines, lambda: bar.advance(task), start)
            after_engines(failed)
    return failed


def measure_together(
    plan: Plan, engines: Sequence[Engine], advance: Callable[[], None], start: Start
) -> Failures:
    """Measure what some engines have left, each in a process of its own."""
    turns = turns_of(plan, engines)
    failed: Failures = {}
    with ExitStack() as stack:
        running: dict[str, Generator[Event]] = {}

        def turn_of(name: str) -> list[Event]:
            """Let an engine work until it waits for its next turn."""
            try:
                return turn(running[name])
            except EngineError as error:
                failed[name] = str(error)
                console.print(f"failed: {error}", markup=False)
                return []

        jobs = {engine.side.name: job_of(plan, engine, turns) for engine in engines}
        for name, job in jobs.items():
            if job.cells:
                events = start(job, plan.out / "logs" / f"{name}.log")
                running[name] = stack.enter_context(closing(events))
                turn_of(name)
        for round_, engine, _ in turns:
            name = engine.side.name
            for result in results_of(turn_of(name)) if name not in failed else []:
                plan.keep(jobs[name], round_, result)
                advance()
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


def job_of(plan: Plan, engine: Engine, turns: Sequence[Turn]) -> Job:
    """Make the job of one engine: all its turns."""
    mine = [(round_, cell) for round_, other, cell in turns if other is engine]
    name = f"{engine.side.name}.{mine[0][1].name}.{mine[0][0]}" if mine else ""
    return plan.job.model_copy(
        update={
            "side": engine.side,
            "cells": [cell for _, cell in mine],
            "seed": zlib.crc32(name.encode()),
            "timeout_s": plan.job.timeout_s * len(turns),
            "in_turns": True,
        }
    )
