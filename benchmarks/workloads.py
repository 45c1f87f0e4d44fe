"""Which method suits which work: chat, code, mathematics, editing, reading."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.compare import comparison, engines_of
from benchmarks.harness import options, plot, report
from benchmarks.harness.models import Models, find_models
from benchmarks.harness.plan import base_job, make_plan, run_plan
from benchmarks.harness.provenance import provenance
from benchmarks.harness.report import Content, number
from benchmarks.harness.turns import execute_in_turns
from benchmarks.workload_prompts import find_workloads
from vllm_treespec.config import HEAD_METHODS
from vllm_treespec.tools import sides as kinds
from vllm_treespec.tools.rows import MIN_SPEEDUP, Row
from vllm_treespec.tools.sides import PLAIN, Cell, Job, Side
from vllm_treespec.tools.store import settings_of

SUFFIX = "suffix_tree"
# methods that draft from an index
INDEXES = (SUFFIX, "hybrid")
DRAFT_METHODS = ("sd", "rsd_c", "rsd_s")
HEADS = ("redrafter", "medusa", "eagle")
NOTES = (
    "Prompts are read before they are measured and stay in the prefix cache, so a "
    "cell measures decoding. Suffix trees use the request's own prompt and output "
    "only. Trees are the same in every step unless the name says adaptive. Above "
    "temperature 0 every side's answers differ."
)
FULL_BATCHES = "benchmarks.harness.full_batches:measure"
Data = Annotated[
    Path,
    typer.Option(
        help="Folder with the data sets' files, or JSONL with workload and prompt."
    ),
]
Chosen = Annotated[
    str, typer.Option(help="all, or some of chat,code,mathematics,editing,reading.")
]
NumPrompts = Annotated[
    int, typer.Option(min=1, help="At batch size 1; larger batches: see --waves.")
]
Waves = Annotated[
    int,
    typer.Option(
        min=1,
        help="A larger batch asks this many times its size; from 2 on it stays full.",
    ),
]
Together = Annotated[
    int,
    typer.Option(
        min=1,
        help="Engines in memory at the same time, which measure each cell in turn.",
    ),
]


def workloads(
    data: Data,
    workloads: Chosen = "all",
    num_prompts: NumPrompts = 3,
    waves: Waves = 1,
    batch_sizes: options.BatchSizes = "1,4,16",
    temperatures: options.Temperatures = "0,1",
    top_p: options.TopP = None,
    repetition_penalty: options.RepetitionPenalty = None,
    spec: options.Specs = None,
    sides: options.Names = "",
    rounds: options.Rounds = 1,
    together: Together = 1,
    max_tokens: options.MaxTokens = 64,
    stock_depth: options.StockDepth = 6,
    engines: options.Engines = "eager",
    dtype: options.Dtype = "bfloat16",
    target: options.Target = "",
    draft: options.Draft = "",
    head: options.Heads = None,
    out: options.Out = Path("runs/workloads"),
    fresh: options.Fresh = False,
    dry_run: options.DryRun = False,
) -> None:
    """Measure each kind of work, and say which method to use for it."""
    with options.one_line_errors("workloads"):
        models = find_models(target, draft, head or [], list(HEADS))
        specs = [options.json_object(text, "--spec") for text in spec or []]
        modes = options.eager_modes(engines)
        found, cells = find_cells(
            data, workloads, batch_sizes, temperatures, num_prompts, waves
        )
        all_sides = sides_of(specs or usual_specs(models), models, stock_depth, modes)
        chosen = kinds.choose_sides(all_sides, options.words(sides))
        job = base_job(
            models.target,
            [],
            max_tokens,
            workloads=found,
            dtype=dtype,
            top_p=top_p,
            repetition_penalty=repetition_penalty,
        )
        side_engines = engines_of(chosen, cells, rounds)
        plan = make_plan(job, side_engines, out, models.named(), fresh)
    asked = prompts_asked(data, job)
    origin = provenance("workloads", models=models.named(), prompts=asked)
    measure = partial(execute_in_turns, together=together) if together > 1 else None
    contents = partial(comparison, cells)
    run_plan(plan, origin, contents, render, dry_run, measure=measure)


def find_cells(
    data: Path,
    workloads: str,
    batch_sizes: str,
    temperatures: str,
    num_prompts: int,
    waves: int,
) -> tuple[dict[str, list[str]], list[Cell]]:
    """Find the prompts of each workload, and the cells to measure; see the options.

    Raises:
        ValueError: when an option cannot be read, or prompts are missing.

    """
    sizes = options.numbers(batch_sizes, "--batch-sizes", int, 1)
    asked_at = {size: num_prompts if size == 1 else waves * size for size in sizes}
    found = find_workloads(
        data,
        [] if workloads == "all" else options.words(workloads),
        max(asked_at.values()),
    )
    cells = [
        Cell(
            batch_size=size,
            temperature=temperature,
            workload=name,
            num_prompts=asked_at[size],
            measure=FULL_BATCHES if size > 1 and waves > 1 else "",
        )
        for name in found
        for size in sizes
        for temperature in options.numbers(temperatures, "--temperatures", float, 0)
    ]
    return found, cells


def prompts_asked(data: Path, job: Job) -> str:
    """Write what is asked, for the provenance."""
    prompts = job.workloads
    counts = ", ".join(f"{len(texts)} {name}" for name, texts in prompts.items())
    asked = f"{counts} of {data.name} ({settings_of(prompts)})"
    asked += f", top_p {job.top_p:g}" if job.top_p else ""
    if job.repetition_penalty:
        asked += f", repetition_penalty {job.repetition_penalty:g}"
    return asked


def usual_specs(models: Models) -> list[dict[str, Any]]:
    """The methods that have their model, each with its default tree."""
    methods = [
        SUFFIX,
        *(DRAFT_METHODS if models.draft else ()),
        *(HEAD_METHODS[kind] for kind in HEADS if kind in models.heads),
    ]
    return [{"method": method} for method in methods]


def sides_of(
    specs: Sequence[dict[str, Any]],
    models: Models,
    stock_depth: int,
    modes: Sequence[bool],
) -> list[Side]:
    """Make plain twice, the stock methods and the sides of the spec-configs."""
    return [
        *kinds.plain_sides(),
        *kinds.stock_sides(kinds.stock_specs(models.draft), stock_depth, modes),
        *kinds.tree_sides(of_own_text(specs), models.draft, modes, models.heads),
    ]


def of_own_text(specs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Let indexes know no earlier answers: prompts repeat between cells."""
    return [
        {**spec, "max_cached_tokens": 0} if spec.get("method") in INDEXES else spec
        for spec in specs
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
    columns = COLUMNS | (MODES if any(row.modes for row in rows) else {})
    parts += ["## All cells", report.table_of(rows, columns), "## Reading it", NOTES]
    report.write_markdown(out, "Workloads", parts, content)
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


COLUMNS = {
    "workload": lambda row: row.cell.workload,
    "batch": lambda row: str(row.cell.batch_size),
    "T": lambda row: f"{row.cell.temperature:g}",
    "side": lambda row: row.side,
    "tokens/s (min–max)": lambda row: report.spread(
        row.tokens_per_s, row.tokens_per_s_min, row.tokens_per_s_max
    ),
    "speed-up": lambda row: number(row.speedup, "{:.2f}×"),
    "acceptance length": lambda row: number(row.acceptance_length, "{:.2f}"),
    "nodes": lambda row: number(row.mean_nodes, "{:.1f}"),
    "tokens per answer": lambda row: (
        f"{row.num_tokens / row.rounds / (row.cell.num_prompts or 1):.0f}"
    ),
    "rounds": lambda row: str(row.rounds),
}


def modes(row: Row) -> str:
    """Write how many steps drew each tree or none, and how fast they were."""
    written = [
        f"{mode.steps} {name}: {number(mode.tokens_per_s, '{:.1f}')}"
        for name, mode in row.modes.items()
    ]
    return "; ".join(written) or "–"


# tables from before 2026-11-24 have none
MODES = {"steps: tokens/s": modes}


def speedup_table(rows: Sequence[Row]) -> str:
    """Write speed-ups, sides by workload and batch size; plain's tokens/s come last."""
    found: dict[tuple[str, int], dict[str, Row]] = {}
    for row in rows:
        column = found.setdefault((row.cell.workload, row.cell.batch_size), {})
        column[row.side] = row
    lines = []
    for side in dict.fromkeys(row.side for row in rows):
        cells = [column.get(side) for column in found.values()]
        lines.append(
            [side, *(number(c.speedup if c else None, "{:.2f}×") for c in cells)]
        )
    fastest = [
        max(
            (r.tokens_per_s for r in column.values() if r.family == PLAIN), default=None
        )
        for column in found.values()
    ]
    lines.append(["fastest plain, tokens/s", *(number(v, "{:.1f}") for v in fastest)])
    return report.table(["side", *(f"{name} {size}" for name, size in found)], lines)


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
