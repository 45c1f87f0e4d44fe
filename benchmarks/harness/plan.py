"""What an experiment runs: engines in turn, round by round, each with its cells."""

from __future__ import annotations

import shutil
import zlib
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeElapsedColumn,
)

from benchmarks.harness.options import console
from benchmarks.harness.provenance import commit
from benchmarks.harness.report import Content, header, write_json
from vllm_treespec.tools.launch import EngineError
from vllm_treespec.tools.sides import (
    Cell,
    CellResult,
    Job,
    Side,
    Start,
    results_of,
    side_events,
)
from vllm_treespec.tools.store import Stored, read_stored, settings_of, store

Failures = dict[str, str]


class StoredCell(Stored):
    """A measured cell of a side in a round."""

    side: Side
    round: int
    result: CellResult


def without_text(finished: Sequence[StoredCell]) -> list[Content]:
    """What results.json holds of measured cells: all but the answers."""
    exclude: Any = {"result": {"token_ids"}}
    return [stored.model_dump(mode="json", exclude=exclude) for stored in finished]


def without_engines(finished: Sequence[StoredCell]) -> list[Content]:
    """What results.json holds of measured cells with their answers."""
    exclude: Any = {"side": {"engine"}}
    return [stored.model_dump(mode="json", exclude=exclude) for stored in finished]


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


def make_plan(
    job: Job,
    engines: Sequence[Engine],
    out: Path,
    deciding: Any,
    fresh: bool = False,
    identify: Callable[[Side], Any] = Side.model_dump,
) -> Plan:
    """Make a plan and check that what is finished belongs to it.

    Raises:
        ValueError: when the folder holds results of other settings.

    """
    if fresh:
        shutil.rmtree(out / "cells", ignore_errors=True)
    plan = Plan(job, engines, out, deciding, commit(), identify)
    plan.finished()
    return plan


def base_job(target: str, prompts: Sequence[str], max_tokens: int, **more: Any) -> Job:
    """Make what all engines of a plan share."""
    unset = Side(name="", family="", engine={})
    return Job(
        side=unset,
        target=target,
        prompts=list(prompts),
        cells=[],
        max_tokens=max_tokens,
        **more,
    )


# Runs a plan's engines and calls a function when some are done; returns failures.
Measure = Callable[[Plan, Callable[[Failures], None]], Failures]


def run_plan(
    plan: Plan,
    origin: Content,
    contents: Callable[[list[StoredCell]], Content],
    render: Callable[[Content, Path], None],
    dry_run: bool = False,
    then: Callable[[list[StoredCell]], Plan] | None = None,
    measure: Measure | None = None,
) -> None:
    """Print the plan, run it, and write all results after every engine.

    ``contents`` makes what results.json holds of the finished cells, ``render`` tables
    and plots of it; ``then`` makes a plan of what comes after the finished cells;
    ``measure`` runs the engines of a plan, :func:`execute` if it is not given.
    Exits with status 1 when an engine failed.
    """

    def write(failed: Failures) -> None:
        finished = plan.finished()
        content = header(origin, failed, finished) | contents(finished)
        write_json(plan.out, content)
        render(content, plan.out)

    todo = plan.todo()
    cells = sum(len(job.cells) for _, job in todo)
    console.print("sides: " + " ".join(engine.side.name for engine in plan.engines))
    console.print(
        f"{cells} cells to measure in {len(todo)} engines; with a 135M target on two "
        f"idle cores about {estimated_seconds(plan) / 60:.0f} minutes"
    )
    if dry_run:
        return
    measure = measure or execute
    failed = measure(plan, write)
    if then is not None:
        failed |= measure(then(plan.finished()), write)
    write(failed)
    console.print(f"wrote results.json, results.md and plots to {plan.out}")
    if failed:
        raise typer.Exit(1)


def execute(
    plan: Plan, after_engine: Callable[[Failures], None], start: Start = side_events
) -> Failures:
    """Measure what is left; returns why engines failed, by side.

    A side that failed is left out of later rounds; the others go on. Each cell is
    stored when it is measured.
    """
    todo = plan.todo()
    failed: Failures = {}
    with Progress(*progress_columns(), console=console) as bar:
        task = bar.add_task("", total=sum(len(job.cells) for _, job in todo))
        for round_, job in todo:
            name = job.side.name
            if name in failed:
                bar.advance(task, len(job.cells))
                continue
            bar.update(task, description=f"round {round_ + 1}: {name}")
            log = plan.out / "logs" / f"{name}.{round_}.log"
            try:
                with closing(start(job, log)) as events:
                    for result in results_of(events):
                        plan.keep(job, round_, result)
                        bar.advance(task)
            except EngineError as error:
                failed[name] = str(error)
                bar.console.print(f"failed: {error}", markup=False)
            else:
                after_engine(failed)
    return failed


def progress_columns() -> tuple[ProgressColumn, ...]:
    """What the progress bar of an experiment shows."""
    return (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )


def estimated_seconds(plan: Plan) -> float:
    """Rough time of what is left to run, on two cores with a 135M target.

    Origin of the numbers: an engine starts in about 40 s; a step takes 15 ms, 1.5 ms
    more for each row of a tree, and emits about two tokens of a request with a tree.
    """
    seconds = 0.0
    for _, job in plan.todo():
        drafts = job.side.budget
        seconds += 40
        for cell in job.cells:
            answers = cell.num_prompts or len(job.prompts) or 1
            steps = answers * (cell.max_tokens or job.max_tokens) / (2 if drafts else 1)
            seconds += steps / cell.batch_size * 0.015
            seconds += steps * 0.0015 * drafts
    return seconds
