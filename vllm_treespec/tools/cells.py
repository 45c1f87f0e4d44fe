"""Engines in turn, round by round, each with its cells, which are kept in files."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_treespec.tools.launch import EngineError
from vllm_treespec.tools.sides import Cell, CellResult, Job, Side, Start, results_of
from vllm_treespec.tools.store import Stored, read_stored, settings_of, store


class StoredCell(Stored):
    """A measured cell of a side in a round."""

    side: Side
    round: int
    result: CellResult


@dataclass(frozen=True)
class Engine:
    """A side, the cells that its engine measures, and how often."""

    side: Side
    cells: Sequence[Cell]
    rounds: int = 1


@dataclass(frozen=True)
class Plan:
    """Engines in turn, and where their results go."""

    # what all engines share; side, cells and seed are filled in
    job: Job
    engines: Sequence[Engine]
    out: Path
    # all else that decides the results: SHA-256 of weights, the machine
    deciding: Any
    commit: str | None
    # what of a side decides its results
    identify: Callable[[Side], Any] = Side.model_dump

    @property
    def rounds(self) -> int:
        """Most rounds of any engine."""
        return max((engine.rounds for engine in self.engines), default=0)

    def settings(self, side: Side) -> str:
        """Tell results of other settings apart."""
        shared = self.job.model_dump(
            exclude={
                *("side", "target", "cells", "seed", "timeout_s", "stream", "in_turns")
            }
        )
        return settings_of(self.deciding, shared, self.identify(side))

    def file(self, side: Side, cell: Cell, round_: int) -> Path:
        """File of a measured cell."""
        return self.out / "cells" / side.name / f"{cell.name}.{round_}.json"

    def todo(self) -> list[tuple[int, Job]]:
        """Rounds and jobs of the engines that have cells left to measure.

        Seeds differ between engines, between rounds, and when broken-off work goes on:
        no two cells share random numbers.
        """
        jobs = []
        for round_ in range(self.rounds):
            for engine in self.engines:
                left = [
                    cell
                    for cell in engine.cells
                    if round_ < engine.rounds
                    and not self.file(engine.side, cell, round_).is_file()
                ]
                if left:
                    name = f"{engine.side.name}.{left[0].name}.{round_}"
                    filled = {"side": engine.side, "cells": left}
                    seed = {"seed": zlib.crc32(name.encode())}
                    jobs.append((round_, self.job.model_copy(update=filled | seed)))
        return jobs

    def finished(self) -> list[StoredCell]:
        """Read all finished cells in the output folder, of other sides too.

        Raises:
            ValueError: when one was made with other settings.

        """
        planned = {engine.side.name: engine.side for engine in self.engines}
        return read_stored(
            sorted((self.out / "cells").glob("*/*.json")),
            StoredCell,
            lambda stored: self.settings(planned.get(stored.side.name, stored.side)),
        )

    def keep(self, job: Job, round_: int, result: CellResult) -> None:
        """Store a measured cell."""
        stored = StoredCell(
            settings=self.settings(job.side),
            commit=self.commit,
            side=job.side,
            round=round_,
            result=result,
        )
        store(self.file(job.side, result.cell, round_), stored)

    def measure(
        self, job: Job, round_: int, start: Start, after_cell: Callable[[], None]
    ) -> str | None:
        """Run an engine and store each measured cell; returns why it failed, if so."""
        log = self.out / "logs" / f"{job.side.name}.{round_}.log"
        try:
            with closing(start(job, log)) as events:
                for result in results_of(events):
                    self.keep(job, round_, result)
                    after_cell()
        except EngineError as error:
            return str(error)
        return None
