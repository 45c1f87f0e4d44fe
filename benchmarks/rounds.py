"""Sides in turn, round by round; every finished run is kept in a file."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)

from benchmarks.sides import estimated_seconds
from benchmarks.tasks import Finished, read_runs, store
from vllm_treespec.config import METHODS
from vllm_treespec.tools.launch import EngineError
from vllm_treespec.tools.rows import Row, summarise, with_speedups
from vllm_treespec.tools.sides import PLAIN, Cell, Job, Side, SideResult, run_side

FAMILIES = (PLAIN, "ngram", "draft_model", *METHODS)


class StoredRun(Finished):
    """A finished run of a side in the output folder."""

    side: Side
    round: int
    result: SideResult


@dataclass(frozen=True)
class Plan:
    """What to run and where the results go."""

    sides: list[Side]
    rounds: int
    cells: list[Cell]
    prompts: list[str]
    target: str
    max_tokens: int
    out: Path
    # SHA-256 of the weights and the like, part of the settings
    models: str
    commit: str | None
    # prompts by workload; the cells then name them
    workloads: dict[str, list[str]] = field(default_factory=dict)

    def job(self, side: Side, round_: int) -> Job:
        """Job of a side in a round; each round samples with another seed."""
        return Job(
            side=side,
            target=self.target,
            prompts=self.prompts,
            workloads=self.workloads,
            cells=[c for c in self.cells if not side.greedy_only or not c.temperature],
            max_tokens=self.max_tokens,
            seed=round_,
        )

    def settings(self, job: Job) -> str:
        """Tell runs of other settings apart; the seed only says which round it is."""
        told = self.models + job.model_dump_json(exclude={"seed", "timeout_s"})
        return hashlib.sha256(told.encode()).hexdigest()[:16]

    def stored(self, side: Side, round_: int) -> Path:
        """File of a finished run."""
        return self.out / "runs" / f"{side.name}.{round_}.json"

    def todo(self) -> list[tuple[int, Side]]:
        """Runs that are not finished, round by round."""
        return [
            (round_, side)
            for round_ in range(self.rounds)
            for side in self.sides
            if self.job(side, round_).cells and not self.stored(side, round_).is_file()
        ]

    def seconds(self) -> float:
        """Estimate of what is left to run."""
        cells = [
            (cell.batch_size, cell.temperature, cell.num_prompts or len(self.prompts))
            for cell in self.cells
        ]
        return sum(
            estimated_seconds(side, cells, self.max_tokens) for _, side in self.todo()
        )


@dataclass
class CellCounter:
    """Says in a progress bar how many cells of the running side are done."""

    bar: Progress
    task: TaskID
    name: str
    total: int
    done: int = 0

    def __call__(self, event: dict[str, Any]) -> None:
        """Count an event of the side's process."""
        self.done += event["event"] == "cell"
        text = f"{self.name}, {self.done} of {self.total} cells"
        self.bar.update(self.task, description=text)


def execute(
    plan: Plan, console: Console, after_run: Callable[[dict[str, str]], None]
) -> dict[str, str]:
    """Run what is to do; returns why sides failed, by name.

    A side that failed is left out of later rounds; the others go on. `after_run` is
    called with the failures so far whenever a run is stored.
    """
    todo = plan.todo()
    failed: dict[str, str] = {}
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console) as bar:
        task = bar.add_task("starting", total=len(todo))
        for round_, side in todo:
            if side.name not in failed:
                name = f"round {round_ + 1}: {side.name}"
                bar.update(task, description=name)
                job = plan.job(side, round_)
                cells = CellCounter(bar, task, name, len(job.cells))
                log = plan.out / "logs" / f"{side.name}.{round_}.log"
                try:
                    result = run_side(job, log, cells)
                except EngineError as error:
                    failed[side.name] = str(error)
                    bar.console.print(f"[red]failed[/red] {error}")
                else:
                    keep(plan, job, round_, result)
                    after_run(failed)
            bar.advance(task)
    return failed


def keep(plan: Plan, job: Job, round_: int, result: SideResult) -> None:
    """Store a finished run; the file appears complete or not at all."""
    run = StoredRun(
        side=job.side,
        round=round_,
        settings=plan.settings(job),
        commit=plan.commit,
        result=result,
    )
    store(plan.stored(job.side, round_), run)


def finished_runs(plan: Plan) -> list[StoredRun]:
    """Read all finished runs in the output folder, of other sides and rounds too.

    Raises:
        ValueError: when one was made with other settings.

    """
    return read_runs(
        sorted((plan.out / "runs").glob("*.json")),
        StoredRun,
        lambda run: plan.settings(plan.job(run.side, run.round)),
        "pass --fresh to measure anew or another --out",
    )


def rows_of(plan: Plan, runs: Sequence[StoredRun]) -> list[Row]:
    """Rows by cell; stock sides first, then ours by method and budget."""
    sides = {run.side.name: run.side for run in runs}
    rows = []
    for cell in plan.cells:
        for side in sorted(sides.values(), key=place):
            results = [
                result
                for run in runs
                if run.side.name == side.name
                for result in run.result.cells
                if result.cell == cell
            ]
            if results:
                rows.append(summarise(side, results))
    return with_speedups(rows)


def place(side: Side) -> tuple[bool, int, int, str]:
    """Place of a side in a table."""
    return (bool(side.budget), FAMILIES.index(side.family), side.budget, side.name)
