"""Compare stock vLLM with draft trees, every side in a fresh engine, in turn."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.harness import options, plot, report
from benchmarks.harness.models import find_models, take_prompts
from benchmarks.harness.plan import (
    Engine,
    StoredCell,
    base_job,
    make_plan,
    run_plan,
    without_text,
)
from benchmarks.harness.provenance import provenance
from benchmarks.harness.report import Content, number
from benchmarks.rsd.trees import PAPER_TREES
from vllm_treespec.batch.stats import STAGES
from vllm_treespec.config import METHODS
from vllm_treespec.tools import sides as kinds
from vllm_treespec.tools.prompts import SHIPPED
from vllm_treespec.tools.rows import Row, summarise, with_speedups
from vllm_treespec.tools.sides import PLAIN, Cell, Side

FAMILIES = (PLAIN, "ngram", "draft_model", *METHODS)
MAX_DEPTHS = 6
# with vLLM's own processes for scheduler and worker
PLAIN_DEFAULT = kinds.plain_side("plain-default", eager=False, one_process=False)
Budgets = Annotated[str, typer.Option(help="Draft tokens, comma-separated.")]
Trees = Annotated[
    str, typer.Option(help="`one` RSD-C and one RSD-S tree per budget, or `all`.")
]


def compare(
    prompts: options.PromptsFile = SHIPPED,
    num_prompts: options.NumPrompts = 8,
    batch_sizes: options.BatchSizes = "1,8",
    temperatures: options.Temperatures = "0,1",
    budgets: Budgets = "6,10,14,21,30",
    trees: Trees = "one",
    spec: options.Specs = None,
    sides: options.Names = "",
    rounds: options.Rounds = 1,
    max_tokens: options.MaxTokens = 96,
    stock_depth: options.StockDepth = 6,
    engines: options.Engines = "eager",
    target: options.Target = "",
    draft: options.Draft = "",
    head: options.Heads = None,
    out: options.Out = Path("runs/compare"),
    fresh: options.Fresh = False,
    dry_run: options.DryRun = False,
) -> None:
    """Compare stock vLLM and draft trees of several sizes."""
    with options.one_line_errors("compare"):
        models = find_models(target, draft, head or [])
        modes = options.eager_modes(engines)
        specs = [options.json_object(text, "--spec") for text in spec or []]
        if models.draft:
            specs = [*tree_specs(budgets, trees), *specs]
        stock = kinds.stock_specs(models.draft)
        all_sides = [
            *kinds.plain_sides(),
            PLAIN_DEFAULT,
            *kinds.stock_sides(stock, stock_depth, modes),
            *kinds.tree_sides(specs, models.draft, modes, models.heads),
        ]
        chosen = kinds.choose_sides(all_sides, options.words(sides))
        cells = cells_of(batch_sizes, temperatures)
        asked, source = take_prompts(prompts, num_prompts)
        job = base_job(models.target, asked, max_tokens)
        side_engines = engines_of(chosen, cells, rounds)
        plan = make_plan(job, side_engines, out, models.named(), fresh)
    origin = provenance("compare", models=models.named(), prompts=source)
    run_plan(plan, origin, partial(comparison, cells), render, dry_run)


def tree_specs(budgets: str, trees: str) -> list[dict[str, Any]]:
    """List the paper's spec-configs for these budgets, without the draft model.

    Raises:
        ValueError: for a budget that the paper has no trees of.

    """
    options.words(trees, "--trees", ("one", "all"))
    take = slice(None) if trees == "all" else slice(1)
    specs: list[dict[str, Any]] = []
    for budget in options.numbers(budgets, "--budgets", int):
        if budget not in PAPER_TREES:
            raise ValueError(
                f"--budgets: the paper has no trees of {budget} draft tokens, only of "
                f"{', '.join(map(str, PAPER_TREES))}; give your tree with --spec"
            )
        shapes = PAPER_TREES[budget]
        specs.append({"method": "sd", "depth": budget})
        for factors in shapes.rsd_c[take]:
            specs.append({"method": "rsd_c", "branching_factors": list(factors)})
        for width, depth in shapes.rsd_s[take]:
            specs.append({"method": "rsd_s", "beam_width": width, "depth": depth})
    return specs


def cells_of(batch_sizes: str, temperatures: str) -> list[Cell]:
    """Make a cell for each batch size and temperature."""
    return [
        Cell(batch_size=batch_size, temperature=temperature)
        for batch_size in options.numbers(batch_sizes, "--batch-sizes", int, 1)
        for temperature in options.numbers(temperatures, "--temperatures", float, 0)
    ]


def engines_of(
    sides: Sequence[Side], cells: Sequence[Cell], rounds: int
) -> list[Engine]:
    """Let every side measure all cells that it can."""
    return [
        Engine(
            side,
            [cell for cell in cells if not (side.greedy_only and cell.temperature)],
            rounds,
        )
        for side in sides
    ]


def comparison(cells: Sequence[Cell], finished: Sequence[StoredCell]) -> Content:
    """Make a row for each side in each cell, and keep all rounds without their text.

    Rows come by cell, stock sides first, then ours by method and budget.
    """
    order = [cell.name for cell in cells]
    groups: dict[tuple[str, str], list[StoredCell]] = {}
    for stored in sorted(finished, key=lambda stored: stored.round):
        key = (stored.result.cell.name, stored.side.name)
        if key[0] in order:
            groups.setdefault(key, []).append(stored)

    def place(row: Row) -> tuple[Any, ...]:
        family = FAMILIES.index(row.family)
        return order.index(row.cell.name), bool(row.budget), family, row.budget

    rows = [
        summarise(group[0].side, [stored.result for stored in group])
        for _, group in sorted(groups.items())
    ]
    rows = with_speedups(sorted(rows, key=place))
    return {
        "rows": [row.model_dump(mode="json") for row in rows],
        "runs": without_text(finished),
    }


def render(content: Content, out: Path) -> None:
    """Write one table per cell, and the plot."""
    rows = [Row.model_validate(row) for row in content["rows"]]
    report.write_markdown(out, "Benchmark", tables(rows), content)
    plot.line_panels(
        best_trees(rows),
        out / "results.png",
        x="draft tokens per tree",
        y="value",
        hue="method",
        style="temperature",
        col="batch",
        row="metric",
    )


def tables(rows: Sequence[Row]) -> list[str]:
    """Write one table per cell, and how to read them."""
    parts = []
    for cell in dict.fromkeys(row.cell for row in rows):
        here = [row for row in rows if row.cell == cell]
        parts.append(f"## Batch {cell.batch_size}, temperature {cell.temperature:g}")
        parts += [report.table_of(here, COLUMNS), *best(here)]
    return parts


def depths(row: Row) -> str:
    """Write the shares of trees that were accepted so deep."""
    shares = [f"{share:.2f}" for share in row.acceptance_by_depth]
    more = ["…"] if len(shares) > MAX_DEPTHS else []
    return " ".join(shares[:MAX_DEPTHS] + more) or "–"


def percent(row: Row, stage: str) -> str:
    """Write a stage's share of the wall time."""
    share = row.stage_shares.get(stage)
    return number(None if share is None else 100 * share, "{:.0f}")


COLUMNS: report.Columns[Row] = {
    "side": lambda row: row.side,
    "drafts": lambda row: str(row.budget or "–"),
    "tokens/s (min–max)": lambda row: report.spread(
        row.tokens_per_s, row.tokens_per_s_min, row.tokens_per_s_max
    ),
    "speed-up": lambda row: number(row.speedup, "{:.2f}×"),
    "TPOT ms": lambda row: number(row.tpot_ms, "{:.1f}"),
    "acceptance length": lambda row: number(row.acceptance_length, "{:.2f}"),
    "accepted at depth 1, 2, …": depths,
    "nodes": lambda row: number(row.mean_nodes, "{:.1f}"),
    **{f"{stage} %": partial(percent, stage=stage) for stage in (*STAGES, "other")},
    "rounds": lambda row: str(row.rounds),
}


def best(rows: Sequence[Row]) -> list[str]:
    """Say which of ours is fastest, against which plain side."""
    plain = [row for row in rows if row.family == PLAIN]
    ours = [row for row in rows if row.stage_shares]
    if not plain or not ours:
        return []
    base = max(plain, key=lambda row: row.tokens_per_s)
    top = max(ours, key=lambda row: row.tokens_per_s)
    return [
        f"Fastest of ours: {top.side}, {top.tokens_per_s / base.tokens_per_s:.2f}× "
        f"the fastest plain side ({base.side}, {base.tokens_per_s:.1f} tokens/s)."
    ]


def best_trees(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Points of the plot: of each method and budget, the tree that is best."""
    found: dict[tuple[Any, ...], dict[str, Any]] = {}
    for row in rows:
        if row.family == PLAIN:
            continue
        for metric, value in (
            ("acceptance length", row.acceptance_length),
            ("speed-up over plain", row.speedup),
        ):
            point = {
                "metric": metric,
                "batch": f"batch {row.cell.batch_size}",
                "method": row.family,
                "temperature": row.cell.temperature,
                "draft tokens per tree": row.budget,
                "value": value,
            }
            key = tuple(point.values())[:-1]
            if value is not None and value >= found.get(key, point)["value"]:
                found[key] = point
    return list(found.values())
