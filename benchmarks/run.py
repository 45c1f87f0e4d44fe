"""The benchmark: every side in a fresh engine, in turn, several rounds.

    python -m benchmarks.run --prompts FILE.jsonl --out DIR

README.md beside this file says what is measured and how.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import BaseModel
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
)

from benchmarks import plot, report
from benchmarks.provenance import model, provenance, sha256
from benchmarks.sides import (
    PAPER_TREES,
    choose,
    estimated_seconds,
    stock_sides,
    tree_sides,
    tree_specs,
)
from vllm_treespec.assets import drafters, ensure_target
from vllm_treespec.compare import (
    Cell,
    CompareError,
    Job,
    Row,
    Side,
    SideResult,
    run_side,
    summarise,
    with_speedups,
)
from vllm_treespec.prompts import SHIPPED, load_prompts, spread

console = Console(stderr=True, soft_wrap=True)


class StoredRun(BaseModel):
    """A finished run in the output folder."""

    side: Side
    round: int
    # of everything that decides the result; see fingerprint
    settings: str
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

    def job(self, side: Side, round_: int) -> Job:
        """Job of a side in a round; each round samples with another seed."""
        return Job(
            side=side,
            target=self.target,
            prompts=self.prompts,
            cells=[c for c in self.cells if not side.greedy_only or not c.temperature],
            max_tokens=self.max_tokens,
            seed=round_,
        )

    def stored(self, side: Side, round_: int) -> Path:
        """File of a finished run."""
        return self.out / "runs" / f"{side.name}.{round_}.json"

    def todo(self) -> list[tuple[int, Side]]:
        """Runs that are not finished, round by round."""
        return [
            (round_, side)
            for round_ in range(self.rounds)
            for side in self.sides
            if self.job(side, round_).cells
            and not self.stored(side, round_).is_file()
        ]

    def seconds(self) -> float:
        """Estimate of what is left to run."""
        cells = [(cell.batch_size, cell.temperature) for cell in self.cells]
        return sum(
            estimated_seconds(side, cells, len(self.prompts), self.max_tokens)
            for _, side in self.todo()
        )


def fingerprint(job: Job) -> str:
    """Tell runs of other settings apart; the seed only says which round it is."""
    told = job.model_dump_json(exclude={"seed", "timeout_s"})
    return hashlib.sha256(told.encode()).hexdigest()[:16]


def execute(plan: Plan, todo: Sequence[tuple[int, Side]], write: Callable[[dict[str, str]], None]) -> dict[str, str]:
    """Run what is to do; returns why sides failed, by name.

    A side that failed is left out of later rounds; the others go on.
    """
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
                bar.update(task, description=f"round {round_ + 1}: {side.name}")
                job = plan.job(side, round_)
                log = plan.out / "logs" / f"{side.name}.{round_}.log"
                try:
                    result = run_side(job, log)
                except CompareError as error:
                    failed[side.name] = str(error)
                    bar.console.print(f"[red]failed[/red] {error}")
                else:
                    keep(plan, job, round_, result)
                    write(failed)
            bar.advance(task)
    return failed


def keep(plan: Plan, job: Job, round_: int, result: SideResult) -> None:
    """Store a finished run; the file appears complete or not at all."""
    run = StoredRun(
        side=job.side, round=round_, settings=fingerprint(job), result=result
    )
    path = plan.stored(job.side, round_)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text(run.model_dump_json(), encoding="utf-8")
    partial.rename(path)


def finished_runs(plan: Plan) -> list[StoredRun]:
    """Finished runs of the plan's sides, also of rounds beyond the plan's.

    Raises:
        ValueError: when one was made with other settings.

    """
    runs = []
    for side in plan.sides:
        for path in sorted((plan.out / "runs").glob(f"{side.name}.*.json")):
            run = StoredRun.model_validate_json(path.read_text(encoding="utf-8"))
            if run.side.name != side.name:
                continue
            if run.settings != fingerprint(plan.job(side, run.round)):
                raise ValueError(
                    f"{path} was made with other settings; pass --fresh to measure "
                    "anew or another --out"
                )
            runs.append(run)
    return runs


def rows_of(plan: Plan, runs: Sequence[StoredRun]) -> list[Row]:
    """Rows by cell, sides in the plan's order."""
    rows = []
    for cell in plan.cells:
        for side in plan.sides:
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


def write_reports(plan: Plan, origin: dict[str, Any], failed: dict[str, str]) -> None:
    """Write results.json, results.md and results.png from all finished runs."""
    runs = finished_runs(plan)
    rows = rows_of(plan, runs)
    raw = [
        run.model_dump(
            mode="json",
            exclude={"result": {"cells": {"__all__": {"token_ids"}}}},
        )
        for run in runs
    ]
    content = {
        "provenance": origin,
        "failed": failed,
        "rows": [row.model_dump(mode="json") for row in rows],
        "runs": raw,
    }
    plan.out.mkdir(parents=True, exist_ok=True)
    (plan.out / "results.json").write_text(json.dumps(content, indent=1) + "\n")
    (plan.out / "results.md").write_text(report.markdown(rows, failed, origin))
    if rows:
        plot.draw(rows, plan.out / "results.png")


def numbers(text: str, kind: type[Any], option: str) -> list[Any]:
    """Read a comma-separated list."""
    try:
        return [kind(part) for part in text.split(",") if part.strip()]
    except ValueError:
        raise typer.BadParameter(f"{option}: {text!r} is no list of numbers") from None
