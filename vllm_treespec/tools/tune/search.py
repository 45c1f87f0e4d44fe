"""Measures candidates in rounds: those that are far behind are not measured again."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_treespec.tools.cells import Engine, Plan
from vllm_treespec.tools.launch import EngineError
from vllm_treespec.tools.rows import Row, summarise
from vllm_treespec.tools.sides import (
    PLAIN,
    Cell,
    CellResult,
    Job,
    Side,
    Start,
)

# A tree that makes less than this share of the best speed under all loads is left out.
KEEP = 0.9
ROUNDS = 3


class TreeRow(Row):
    """A tree under a load, all rounds; ``cell`` is the load, without the tree."""

    tree: dict[str, Any] | None


@dataclass
class Search:
    """Candidates under loads, within a time.

    Attributes:
        job: what all engines share.
        sides: the candidates; plain first.
        loads: cells without a tree.
        out: folder; what is measured there is not measured again.
        seconds: no engine starts after so many, but for the first two.
        deciding: all else that decides the results.
        on_progress: called when an engine starts and when a cell is measured, with the
            seconds since the search began and what goes on.
        start_engine: starts an engine, which measures a job's cells.

    """

    job: Job
    sides: Sequence[Side]
    loads: Sequence[Cell]
    out: Path
    seconds: float
    deciding: Any
    on_progress: Callable[[float, str], None]
    start_engine: Start

    def __post_init__(self) -> None:
        """Read what was measured before."""
        self.failed: dict[str, str] = {}
        self.start = time.monotonic()
        self.by_name = {side.name: side for side in self.sides}
        engines = [
            Engine(side, cells_of(side, self.loads), ROUNDS) for side in self.sides
        ]
        deciding = [self.job.target, self.deciding]
        self.plan = Plan(self.job, engines, self.out, deciding, commit=None)
        self.finished = self.plan.finished()

    def run(self) -> list[TreeRow]:
        """Measure until the rounds or the time are over; rows of what was measured.

        Raises:
            EngineError: plain vLLM was not measured, so nothing can be compared.

        """
        for round_ in range(ROUNDS):
            if round_:
                if not compared(self.rows()):
                    break
                self.order_by_speed()
            for side in self.sides:
                cells = self.cells_left(side, round_)
                if not cells or side.name in self.failed:
                    continue
                if self.out_of_time():
                    return self.rows()
                self.measure(side, cells, round_)
                if not self.finished and side.family == PLAIN:
                    nothing = f"{side.name}: nothing was measured"
                    raise EngineError(self.failed.get(side.name, nothing))
        return self.rows()

    def out_of_time(self) -> bool:
        """Whether the time is over; plain and one candidate are always measured."""
        sides = {one.side.name for one in self.finished} | set(self.failed)
        return len(sides) > 1 and time.monotonic() - self.start > self.seconds

    def cells_left(self, side: Side, round_: int) -> list[Cell]:
        """What a side measures in a round, and has not yet."""
        worth = None if round_ == 0 else self.worth_another_round()
        return [
            cell
            for cell in cells_of(side, self.loads)
            if not self.plan.file(side, cell, round_).is_file()
            and (worth is None or (side.name, cell.name) in worth)
        ]

    def worth_another_round(self) -> set[tuple[str, str]]:
        """Sides and cells that come near the best of their load; all of plain's."""
        rows = self.rows()
        best: dict[str, float] = {}
        for row in rows:
            name = row.cell.name
            best[name] = max(best.get(name, 0.0), row.tokens_per_s)
        near = [
            row
            for row in rows
            if row.family == PLAIN or row.tokens_per_s >= KEEP * best[row.cell.name]
        ]
        return {(row.side, with_tree(row.cell, row.tree).name) for row in near}

    def order_by_speed(self) -> None:
        """Let plain go first, then the sides with the highest speed under any load."""
        rows = self.rows()
        plain = {row.cell.name: row.tokens_per_s for row in rows if row.family == PLAIN}
        best: dict[str, float] = {}
        for row in rows:
            ratio = row.tokens_per_s / plain.get(row.cell.name, row.tokens_per_s)
            best[row.side] = max(best.get(row.side, 0.0), ratio)
        self.sides = sorted(
            self.sides,
            key=lambda side: (side.family != PLAIN, -best.get(side.name, 0.0)),
        )

    def measure(self, side: Side, cells: Sequence[Cell], round_: int) -> None:
        """Start an engine, measure the cells, and store each as soon as it is there."""

        def report() -> None:
            said = f"round {round_ + 1}: {side.name}, {next(done)} of {len(cells)}"
            self.on_progress(time.monotonic() - self.start, said)

        done = itertools.count()
        report()
        seed = len(self.finished)
        job = self.job.model_copy(update={"side": side, "cells": cells, "seed": seed})
        error = self.plan.measure(job, round_, self.start_engine, report)
        if error is not None:
            self.failed[side.name] = error
        self.finished = self.plan.finished()

    def rows(self) -> list[TreeRow]:
        """A row for each tree under each load; speed-ups are over plain."""
        groups: dict[tuple[str, str], list[CellResult]] = {}
        for one in self.finished:
            if one.side.name in self.by_name:
                key = (one.side.name, one.result.cell.name)
                groups.setdefault(key, []).append(one.result)
        rows = [
            row_of(self.by_name[side], results) for (side, _), results in groups.items()
        ]
        plain = {row.cell.name: row.tokens_per_s for row in rows if row.family == PLAIN}
        for row in rows:
            if row.cell.name in plain:
                row.speedup = row.tokens_per_s / plain[row.cell.name]
        order = {load.name: place for place, load in enumerate(self.loads)}
        return sorted(rows, key=lambda row: order.get(row.cell.name, len(order)))


def compared(rows: Sequence[TreeRow]) -> bool:
    """Whether a load was measured both with plain vLLM and with something else."""
    return any(row.speedup for row in rows if row.family != PLAIN)


def cells_of(side: Side, loads: Sequence[Cell]) -> list[Cell]:
    """Every tree of a side under every load."""
    if side.family == PLAIN:
        return list(loads)
    schedule = side.engine["speculative_config"]["schedule"]
    trees = [{k: v for k, v in e.items() if k != "batch_size"} for e in schedule]
    return [with_tree(load, tree) for load in loads for tree in trees]


def with_tree(load: Cell, tree: dict[str, Any] | None) -> Cell:
    """The cell of a tree under a load."""
    return load.model_copy(update={"tree": tree})


def row_of(side: Side, results: Sequence[CellResult]) -> TreeRow:
    """Pool the rounds of a tree under a load."""
    cell = results[0].cell
    load = with_tree(cell, None)
    shared = [result.model_copy(update={"cell": load}) for result in results]
    return TreeRow(**summarise(side, shared).model_dump(), tree=cell.tree)
