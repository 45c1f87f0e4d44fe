"""How an experiment runs its engines."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
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
from vllm_treespec.tools.cells import Engine, Plan, StoredCell
from vllm_treespec.tools.sides import (
    Job,
    Side,
    Start,
    side_events,
)

Failures = dict[str, str]


def without_text(finished: Sequence[StoredCell]) -> list[Content]:
    """What results.json holds of measured cells: all but the answers."""
    exclude: Any = {"result": {"token_ids"}}
    return [stored.model_dump(mode="json", exclude=exclude) for stored in finished]


def without_engines(finished: Sequence[StoredCell]) -> list[Content]:
    """What results.json holds of measured cells with their answers."""
    exclude: Any = {"side": {"engine"}}
    return [stored.model_dump(mode="json", exclude=exclude) for stored in finished]


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
            error = plan.measure(job, round_, start, lambda: bar.advance(task))
            if error is None:
                after_engine(failed)
                continue
            failed[name] = error
            bar.console.print(f"failed: {error}", markup=False)
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
