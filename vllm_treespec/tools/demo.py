"""The demo: three kinds of work on a real model, plain and with draft trees."""

from __future__ import annotations

import json
import shutil
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from vllm_treespec.config import SpecConfigError
from vllm_treespec.core.processor import slow_arithmetic
from vllm_treespec.tools.assets import (
    REDRAFTER,
    AssetError,
    ensure_target,
    shipped_drafter,
)
from vllm_treespec.tools.launch import EngineError
from vllm_treespec.tools.prompts import SHIPPED_WORKLOADS, load_workloads
from vllm_treespec.tools.rows import MIN_SPEEDUP, Row, summarise, with_speedups
from vllm_treespec.tools.sides import (
    PLAIN,
    Cell,
    Job,
    Side,
    SideResult,
    check_model,
    plain_side,
    run_side,
    tree_side,
)

# The default tree of each method. Prompts repeat, and an answer is not to be drafted
# from an earlier one.
SUFFIX: dict[str, Any] = {"method": "suffix_tree", "max_cached_tokens": 0}
HEAD: dict[str, Any] = {"method": "redrafter"}
WORKLOADS = ("chat", "code", "editing")
TEMPERATURES = (0.0, 1.0)
NUM_PROMPTS = 2
SPEED_TOKENS = 64
EXACT_TOKENS = 24
# Rough times on two cores, for the bar only: engine starts and one cell.
EAGER_START_S, COMPILED_START_S, CELL_S = 15, 55, 3


def main(
    target: str | None = None,
    head: str | None = None,
    prompts: Path = SHIPPED_WORKLOADS,
) -> None:
    """Measure chat, code and editing with and without draft trees; say what to use.

    Args:
        target: folder of the target model; None gets SmolLM2-135M-Instruct.
        head: folder of a ReDrafter head for it; None takes the shipped one.
        prompts: JSONL with ``workload`` and ``prompt``.

    Exits with status 1 when a model is missing or an engine fails; without plain vLLM
    there is nothing to compare with, and no further engine starts.

    """
    console = Console(soft_wrap=True)
    try:
        # The head first: getting the target takes a download.
        sides = sides_of(head or shipped_drafter(REDRAFTER))
        target = target or str(ensure_target())
        check_model("--target", target)
    except (AssetError, SpecConfigError) as error:
        raise SystemExit(f"treespec demo: {error}") from None
    plain, suffix = sides[1], sides[2]
    found = load_workloads(prompts)
    asked = {name: found[name][:NUM_PROMPTS] for name in WORKLOADS if name in found}
    dtype = fast_dtype()
    speed_jobs = [
        job(side, target, asked, TEMPERATURES, SPEED_TOKENS, dtype) for side in sides
    ]
    # one answer to look at: the last workload's first, with suffix trees
    speed_jobs[sides.index(suffix)].stream = next(reversed(asked.values()))[0]
    exact_jobs = [
        job(eager(side), target, asked, (0.0,), EXACT_TOKENS, "float32")
        for side in sides[1:]
    ]
    console.print(
        f"{Path(target).name} on stock vLLM: {', '.join(asked)}; {len(sides)} engines "
        f"for speed ({dtype}), then {len(exact_jobs)} for equality with plain vLLM "
        "(float32); about five minutes on two cores"
    )
    demo = Demo(console, [*speed_jobs, *exact_jobs])
    with demo.bar:
        speed = demo.run(speed_jobs[:2])
        if not speed:
            raise SystemExit("treespec demo: plain vLLM failed; its logs say why")
        speed |= demo.run(speed_jobs[2:])
        exact = demo.run(exact_jobs)
    rows = rows_of(sides, speed)
    console.print(result_table(rows, dtype))
    for line in (*equality(plain.name, exact), *advice(rows, sides)):
        console.print(line, markup=False, highlight=False)
    if demo.failed:
        raise SystemExit(1)


def fast_dtype() -> str:
    """bfloat16, but float32 on a processor that has no arithmetic for it."""
    if torch.cuda.is_available() or slow_arithmetic(torch.bfloat16) is None:
        return "bfloat16"
    return "float32"


def sides_of(head: str) -> list[Side]:
    """Make plain twice, suffix trees and a head's trees, compiled as vLLM's default."""
    return [
        plain_side("plain-compiled", eager=False),
        plain_side("plain-eager", eager=True),
        tree_side(SUFFIX, eager=False),
        tree_side({**HEAD, "model": head}, eager=False),
    ]


def eager(side: Side) -> Side:
    """Make a side that is not compiled: its engine starts sooner."""
    return side.model_copy(update={"engine": {**side.engine, "enforce_eager": True}})


def job(
    side: Side,
    target: str,
    workloads: dict[str, list[str]],
    temperatures: Sequence[float],
    max_tokens: int,
    dtype: str,
) -> Job:
    """Make the job of one engine: every workload, one request at a time."""
    return Job(
        side=side,
        target=target,
        prompts=[],
        workloads=workloads,
        cells=[
            Cell(batch_size=1, temperature=temperature, workload=name)
            for temperature in temperatures
            for name in workloads
        ],
        max_tokens=max_tokens,
        dtype=dtype,
    )


@dataclass
class Demo:
    """Runs engines one after the other under one progress bar."""

    console: Console
    jobs: Sequence[Job]
    failed: bool = False

    def __post_init__(self) -> None:
        """Make the bar, as long as all engines take."""
        self.bar = Progress(
            BarColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.description}"),
            console=self.console,
        )
        total = sum(start_s(job) + CELL_S * len(job.cells) for job in self.jobs)
        self.task: TaskID = self.bar.add_task("", total=total)

    def run(self, jobs: Sequence[Job]) -> dict[str, SideResult]:
        """Run the jobs in turn; results by side, without those that failed."""
        results = {}
        for job in jobs:
            try:
                results[job.side.name] = self.run_one(job)
            except EngineError as error:
                self.failed = True
                self.console.print(f"failed: {error}", style="red", markup=False)
        return results

    def run_one(self, job: Job) -> SideResult:
        """Run one side and move the bar as it goes on."""
        name = f"{job.side.name}, {job.dtype}"
        self.bar.update(self.task, description=f"{name}: starting the engine")
        start = time.monotonic()
        # the log of an engine that fails stays there
        folder = Path(tempfile.mkdtemp(prefix="treespec-demo-"))
        watch = Watch(self.bar, self.task, job, name)
        result = run_side(job, folder / "engine.log", watch)
        shutil.rmtree(folder)
        seconds = time.monotonic() - start
        self.console.print(
            f"{name}: done in {seconds:.0f} s, {result.start_seconds:.0f} s of them "
            "for the engine's start"
        )
        return result


@dataclass
class Watch:
    """Shows the events of one engine's process."""

    bar: Progress
    task: TaskID
    job: Job
    name: str
    num_cells: int = 0
    # of the streamed answer, what makes no whole line yet: the bar is below it
    line: str = ""

    def __call__(self, event: dict[str, Any]) -> None:
        """Move the bar, or print what there is of the streamed answer."""
        kind = event["event"]
        if kind == "text":
            *lines, self.line = (self.line + event["text"]).split("\n")
            for line in lines:
                self.show(line)
        elif kind == "started":
            self.bar.advance(self.task, start_s(self.job))
            self.next_cell()
        elif kind == "cell":
            self.bar.advance(self.task, CELL_S)
            self.num_cells += 1
            self.next_cell()
        elif self.job.stream is not None:
            self.show(f"{self.line} …")

    def next_cell(self) -> None:
        """Say what comes next: a cell, or the streamed answer."""
        if self.num_cells < len(self.job.cells):
            cell = self.job.cells[self.num_cells]
            text = f"{self.name}: {cell.workload}, T = {cell.temperature:g}"
            self.bar.update(self.task, description=text)
        elif self.job.stream is not None:
            self.show(f"{self.job.side.name} answers: {self.job.stream}", "bold")

    def show(self, text: str, style: str = "") -> None:
        """Print above the bar."""
        self.bar.console.print(text, style=style, markup=False, highlight=False)


def start_s(job: Job) -> int:
    """Estimate the start of an engine."""
    return EAGER_START_S if job.side.engine["enforce_eager"] else COMPILED_START_S


def rows_of(sides: Sequence[Side], speed: dict[str, SideResult]) -> list[Row]:
    """Rows of all cells of the sides that did not fail, with their speed-ups."""
    return with_speedups(
        [
            summarise(side, [cell])
            for side in sides
            if side.name in speed
            for cell in speed[side.name].cells
        ]
    )


def result_table(rows: Sequence[Row], dtype: str) -> Table:
    """Make the demo's table: a line per workload and side, columns by temperature."""
    at = " / ".join(f"{temperature:g}" for temperature in TEMPERATURES)
    table = Table(title=f"batch 1, {dtype}, temperature T = {at}")
    table.add_column("work")
    table.add_column("method", no_wrap=True)
    for temperature in TEMPERATURES:
        table.add_column(f"speed-up\nT = {temperature:g}", justify="right")
    for value in ("tokens/s", "acceptance\nlength"):
        table.add_column(value, justify="right", no_wrap=True)
    found = {
        (row.cell.workload, row.side, row.cell.temperature): row_values(row)
        for row in rows
    }
    for workload in dict.fromkeys(row.cell.workload for row in rows):
        for side in dict.fromkeys(row.side for row in rows):
            cells = [found[workload, side, t] for t in TEMPERATURES]
            speedups, *others = zip(*cells, strict=True)
            joined = [" / ".join(values) for values in others]
            table.add_row(workload, side, *speedups, *joined)
        table.add_section()
    return table


def row_values(row: Row) -> tuple[str, str, str]:
    """Speed-up, tokens per second and acceptance length."""
    return (
        "–" if row.speedup is None else f"{row.speedup:.2f}×",
        f"{row.tokens_per_s:.0f}",
        "–" if row.acceptance_length is None else f"{row.acceptance_length:.2f}",
    )


def equality(plain: str, exact: dict[str, SideResult]) -> list[str]:
    """Say how many float32 answers equal plain vLLM's, token for token."""
    if plain not in exact:
        return []
    counts = ", ".join(
        f"{name} {identical(name, plain, exact)}" for name in exact if name != plain
    )
    return [
        f"Greedy answers ({EXACT_TOKENS} tokens, float32) that equal plain vLLM's, "
        f"token for token: {counts}. In bfloat16 the number of rows in a forward "
        "changes rounding, so greedy text may drift there, in stock vLLM too."
    ]


def identical(name: str, plain: str, exact: dict[str, SideResult]) -> str:
    """Count the answers that equal plain vLLM's."""
    ours, theirs = (
        [ids for cell in exact[side].cells for ids in cell.token_ids]
        for side in (name, plain)
    )
    same = sum(a == b for a, b in zip(ours, theirs, strict=True))
    return f"{same} of {len(theirs)}"


def advice(rows: Sequence[Row], sides: Sequence[Side]) -> list[str]:
    """Say in one sentence per workload what to use, by the speed at temperature 0."""
    by_name = {side.name: side for side in sides}
    lines = []
    for workload in dict.fromkeys(row.cell.workload for row in rows):
        ours = [
            row
            for row in rows
            if row.cell.workload == workload
            and row.family != PLAIN
            and row.speedup is not None
        ]
        greedy = [row for row in ours if row.cell.temperature == 0]
        if not greedy:
            continue
        best = max(greedy, key=lambda row: row.speedup or 0.0)
        speedups = ", ".join(
            f"{row.speedup:.1f}× at T = {row.cell.temperature:g}"
            for row in ours
            if row.side == best.side
        )
        if (best.speedup or 0.0) < MIN_SPEEDUP:
            lines.append(
                f"{workload}: use plain vLLM on this small target; the best method, "
                f"{best.family}, runs at {speedups}."
            )
            continue
        spec = by_name[best.side].engine["speculative_config"]
        lines.append(
            f"{workload}: use {best.family}, {speedups} of the fastest plain vLLM; "
            f"{json.dumps(short_spec(spec))}"
        )
    return lines


def short_spec(spec: dict[str, Any]) -> dict[str, Any]:
    """The keys of a spec-config that a user must write for the same tree."""
    return {key: spec[key] for key in ("method", "model") if key in spec}
