"""Measures candidates in rounds: those that are far behind are not measured again."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_treespec.tools.launch import EngineError
from vllm_treespec.tools.rows import Row, summarise
from vllm_treespec.tools.sides import (
    PLAIN,
    Cell,
    CellResult,
    Job,
    Side,
    Start,
    results_of,
)
from vllm_treespec.tools.store import Stored, read_stored, settings_of, store

# A tree that makes less than this share of the best speed under all loads is left out.
KEEP = 0.9
ROUNDS = 3


class Measured(Stored):
    """One cell of one side in one round."""

    side: str
    round: int
    result: CellResult


class TreeRow(Row):
    """A tree under a load, all rounds; ``cell`` is the load, without the tree."""

    tree: dict[str, Any] | None


@dataclass(frozen=True)
class Progress:
    """Where a search stands, for a bar."""

    round: int
    side: str
    cells_done: int
    cells: int
    seconds: float


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
        on_progress: called when an engine starts and when a cell is measured.
        start_engine: starts an engine, which measures a job's cells.

    """

    job: Job
    sides: Sequence[Side]
    loads: Sequence[Cell]
    out: Path
    seconds: float
    deciding: Any
    on_progress: Callable[[Progress], None]
    start_engine: Start

    def __post_init__(self) -> None:
        """Read what was measured before."""
        self.failed: dict[str, str] = {}
        self.start = time.monotonic()
        self.by_name = {side.name: side for side in self.sides}
        self.finished = read_stored(
            sorted((self.out / "cells").glob("*.json")),
            Measured,
            lambda one: self.settings(self.by_name.get(one.side)),
        )

    def settings(self, side: Side | None) -> str:
        """Tell results of other settings apart; a side may be gone."""
        shared = self.job.model_dump(exclude={"side", "cells", "seed", "timeout_s"})
        return settings_of(self.deciding, shared, side and side.model_dump())

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
                    raise EngineError(self.failed[side.name])
        return self.rows()

    def out_of_time(self) -> bool:
        """Whether the time is over; plain and one candidate are always measured."""
        sides = {one.side for one in self.finished} | set(self.failed)
        return len(sides) > 1 and time.monotonic() - self.start > self.seconds

    def cells_left(self, side: Side, round_: int) -> list[Cell]:
        """What a side measures in a round, and has not yet."""
        done = {
            one.result.cell.name
            for one in self.finished
            if (one.side, one.round) == (side.name, round_)
        }
        worth = None if round_ == 0 else self.worth_another_round()
        return [
            cell
            for cell in cells_of(side, self.loads)
            if cell.name not in done
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

        def report(done: int) -> None:
            seconds = time.monotonic() - self.start
            self.on_progress(Progress(round_, side.name, done, len(cells), seconds))

        report(0)
        seed = len(self.finished)
        job = self.job.model_copy(update={"side": side, "cells": cells, "seed": seed})
        log = self.out / "logs" / f"{side.name.replace('/', '_')}.{round_}.log"
        try:
            with closing(self.start_engine(job, log)) as events:
                for done, result in enumerate(results_of(events), 1):
                    self.keep(side, round_, result)
                    report(done)
        except EngineError as error:
            self.failed[side.name] = str(error)

    def keep(self, side: Side, round_: int, result: CellResult) -> None:
        """Store a measured cell."""
        one = Measured(
            settings=self.settings(side),
            side=side.name,
            round=round_,
            result=result.model_copy(update={"token_ids": []}),
        )
        name = f"{side.name.replace('/', '_')}.{result.cell.name}.{round_}.json"
        store(self.out / "cells" / name, one)
        self.finished.append(one)

    def rows(self) -> list[TreeRow]:
        """A row for each tree under each load; speed-ups are over plain."""
        groups: dict[tuple[str, str], list[CellResult]] = {}
        for one in self.finished:
            if one.side in self.by_name:
                key = (one.side, one.result.cell.name)
                groups.setdefault(key, []).append(one.result)
        rows = [
            row_of(self.by_name[side], results) for (side, _), results in groups.items()
        ]
        plain = {row.cell.name: row.tokens_per_s for row in rows if row.family == PLAIN}
        for row in rows:
            if row.cell.name in plain:
                row.speedup = row.tokens_per_s / plain[row.cell.name]
        return rows


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
