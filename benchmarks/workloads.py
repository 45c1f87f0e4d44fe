"""Which method suits which work: chat, code, mathematics, editing, reading."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.harness import options, plot, report
from benchmarks.harness.experiment import Run, WorkOptions, experiment
from benchmarks.harness.models import Models
from benchmarks.harness.plan import base_job
from benchmarks.harness.report import Columns, Content
from benchmarks.harness.rows import SPEEDS, comparison, depths, engines_of
from benchmarks.harness.turns import execute_in_turns
from vllm_treespec.batch.stats import STAGES
from vllm_treespec.tools import sides as kinds
from vllm_treespec.tools.rows import MIN_SPEEDUP, Row
from vllm_treespec.tools.sides import PLAIN, Cell, Side

NOTES = (
    "Prompts are read before they are measured and stay in the prefix cache, so a "
    "cell measures decoding. Suffix trees use the request's own prompt and output "
    "only. Trees are the same in every step unless the name says adaptive. Above "
    "temperature 0 every side's answers differ."
)
FULL_BATCHES = "benchmarks.harness.full_batches:measure"


@dataclass(frozen=True)
class BatchOptions(WorkOptions):
    """Options of experiments that measure batches of several sizes."""

    batch_sizes: options.BatchSizes = "1,8"
    waves: options.Waves = 1

    def find_cells(self) -> tuple[dict[str, list[str]], list[Cell]]:
        """Find the prompts of each workload, and the cells to measure.

        Raises:
            ValueError: when an option cannot be read, or prompts are missing.

        """
        sizes = options.numbers(self.batch_sizes, "--batch-sizes", int, 1)
        asked = {n: self.num_prompts if n == 1 else self.waves * n for n in sizes}
        found = self.work(max(asked.values()))
        cells = [
            Cell(
                batch_size=size,
                temperature=temperature,
                workload=name,
                num_prompts=asked[size],
                measure=FULL_BATCHES if size > 1 and self.waves > 1 else "",
            )
            for name in found
            for size in sizes
            for temperature in self.warmths()
        ]
        return found, cells


@dataclass(frozen=True)
class Options(BatchOptions):
    """Options of ``workloads``."""

    stock_depth: options.StockDepth = 6
    together: Annotated[
        int,
        typer.Option(
            min=1,
            help="Engines in memory at the same time, which measure each cell in turn.",
        ),
    ] = 1


@experiment
def workloads(asked: Options) -> Run:
    """Measure methods or spec-configs on each kind of work, and say which to use."""
    models = asked.models()
    modes = options.EAGER_MODES[asked.engines]
    work, cells = asked.find_cells()
    sides = sides_of(asked.specs(models), models, asked.stock_depth, modes)
    chosen = kinds.choose_sides(sides, options.words(asked.sides))
    turns = partial(execute_in_turns, together=asked.together)
    return Run(
        job=base_job(models.target, [], workloads=work, **asked.requests()),
        engines=engines_of(chosen, cells, asked.rounds),
        models=models,
        prompts=asked.asked(work),
        contents=lambda _, finished: comparison(cells, finished),
        render=render,
        measure=turns if asked.together > 1 else None,
    )


def sides_of(
    specs: Sequence[dict[str, Any]],
    models: Models,
    stock_depth: int,
    modes: Sequence[bool],
) -> list[Side]:
    """Make plain twice, the stock methods and the sides of the spec-configs."""
    specs = options.of_own_text(specs)
    return [
        *kinds.plain_sides(),
        *kinds.stock_sides(kinds.stock_specs(models.draft), stock_depth, modes),
        *kinds.tree_sides(specs, models.draft, modes, models.heads),
    ]


def render(content: Content, out: Path) -> None:
    """Write what to use, speed-ups by temperature, all cells, and the plot."""
    rows = [Row.model_validate(row) for row in content["rows"]]
    smallest = min((row.cell.batch_size for row in rows), default=1)
    first = [row for row in rows if row.cell.batch_size == smallest]
    parts = [f"## What to use at batch size {smallest}", advice(first)]
    for temperature in sorted({row.cell.temperature for row in rows}):
        here = [row for row in rows if row.cell.temperature == temperature]
        parts += [f"## Speed-up at temperature {temperature:g}", speedup_table(here)]
    ours = [row for row in rows if row.stage_shares]
    columns = {**COLUMNS, **(MODES if any(row.modes for row in rows) else {})}
    parts += report.sections(
        {"All cells": (rows, columns), "Shares of the wall time": (ours, SHARES)}
    )
    report.write_markdown(out, "Workloads", [*parts, "## Reading it", NOTES], content)
    plot.bar_panels(
        [
            {
                "work": row.cell.workload,
                "speed-up over plain": row.speedup,
                "side": row.side,
                "temperature": f"{row.cell.temperature:g}, batch {smallest}",
            }
            for row in first
            if row.family != PLAIN
        ],
        out / "results.png",
        x="work",
        y="speed-up over plain",
        hue="side",
        row="temperature",
        level=1,
    )


def answer_tokens(row: Row) -> str:
    """Write the mean length of an answer."""
    return f"{row.num_tokens / row.rounds / (row.cell.num_prompts or 1):.0f}"


def modes(row: Row) -> str:
    """Write how many steps drew each tree or none, and how fast they were."""
    written = [
        f"{mode.steps} {name}: {report.written(mode, '{tokens_per_s:.1f}')}"
        for name, mode in row.modes.items()
    ]
    return "; ".join(written) or "–"


CELL: Mapping[str, str] = {
    "workload": "{cell.workload}",
    "batch": "{cell.batch_size}",
    "T": "{cell.temperature:g}",
    "side": "{side}",
}
COLUMNS: Columns = {
    **CELL,
    "tokens/s (min–max)": SPEEDS,
    "speed-up": "{speedup:.2f}×",
    "TPOT ms": "{tpot_ms:.1f}",
    "acceptance length": "{acceptance_length:.2f}",
    "accepted at depth 1, 2, …": depths,
    "nodes": "{mean_nodes:.1f}",
    "tokens per answer": answer_tokens,
    "rounds": "{rounds}",
}
# tables from before 2026-11-24 have none
MODES: Columns = {"steps: tokens/s": modes}
SHARES: Columns = {
    **CELL,
    **{name: f"{{stage_shares[{name}]:.0%}}" for name in (*STAGES, "other")},
}


def speedup_table(rows: Sequence[Row]) -> str:
    """Write speed-ups, sides by workload and batch size; plain's tokens/s come last."""
    columns: dict[tuple[str, int], str] = {}
    cells: dict[tuple[tuple[str, ...], tuple[str, int]], str] = {}
    for row in rows:
        column = row.cell.workload, row.cell.batch_size
        columns[column] = "{} {}".format(*column)
        cells[(row.side,), column] = report.written(row, "{speedup:.2f}×")
    for row in sorted(rows, key=lambda row: row.tokens_per_s):
        if row.family == PLAIN:
            column = row.cell.workload, row.cell.batch_size
            cells[("fastest plain, tokens/s",), column] = f"{row.tokens_per_s:.1f}"
    return report.grid(["side"], columns, cells)


def advice(rows: Sequence[Row]) -> str:
    """Say per workload which side is best at each temperature."""
    if not rows:
        return "No side is finished."
    lines = []
    for workload in dict.fromkeys(row.cell.workload for row in rows):
        here = [row for row in rows if row.cell.workload == workload]
        said = [
            f"{best([r for r in here if r.cell.temperature == t])} at T = {t:g}"
            for t in sorted({row.cell.temperature for row in here})
        ]
        lines.append(f"- {workload}: {'; '.join(said)}")
    return "\n".join(lines)


def best(rows: Sequence[Row]) -> str:
    """Name the fastest side of a cell and its speed-up, or plain."""
    others = [row for row in rows if row.family != PLAIN and row.speedup is not None]
    if not others:
        return "no plain side and another to compare"
    top = max(others, key=lambda row: row.speedup or 0.0)
    named = f"{top.side} {top.speedup:.2f}×"
    if (top.speedup or 0.0) >= MIN_SPEEDUP:
        return named
    return f"plain vLLM (the best other is {named})"
