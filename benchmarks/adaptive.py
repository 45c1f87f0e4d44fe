"""A tree in every step against a tree only while it pays, over batch sizes."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from benchmarks.compare import cells_of, comparison, engines_of, tables
from benchmarks.harness import options, plot, report
from benchmarks.harness.models import find_models, take_prompts
from benchmarks.harness.plan import base_job, make_plan, run_plan
from benchmarks.harness.provenance import provenance
from benchmarks.harness.report import Content
from vllm_treespec.tools.prompts import SHIPPED
from vllm_treespec.tools.rows import Row
from vllm_treespec.tools.sides import plain_sides, tree_sides


def adaptive(
    spec: options.Specs = None,
    prompts: options.PromptsFile = SHIPPED,
    num_prompts: options.NumPrompts = 32,
    batch_sizes: options.BatchSizes = "1,2,4,8,16,32",
    temperatures: options.Temperatures = "0",
    max_tokens: options.MaxTokens = 40,
    rounds: options.Rounds = 1,
    engines: options.Engines = "compiled",
    target: options.Target = "",
    draft: options.Draft = "",
    head: options.Heads = None,
    out: options.Out = Path("runs/adaptive"),
    fresh: options.Fresh = False,
    dry_run: options.DryRun = False,
) -> None:
    """Measure the schedule: each spec-config's tree in every step, and measured.

    Without --spec: rsd_c with four siblings.
    """
    with options.one_line_errors("adaptive"):
        models = find_models(target, draft, head or [])
        specs = [options.json_object(text, "--spec") for text in spec or []]
        specs = specs or [{"method": "rsd_c", "branching_factors": [4]}]
        modes = options.eager_modes(engines)
        both = [{**s, "schedule": how} for s in specs for how in ("fixed", "measured")]
        cells = cells_of(batch_sizes, temperatures)
        plain = plain_sides(modes)
        sides = [*plain, *tree_sides(both, models.draft, modes, models.heads)]
        asked, source = take_prompts(prompts, num_prompts)
        job = base_job(models.target, asked, max_tokens)
        side_engines = engines_of(sides, cells, rounds)
        plan = make_plan(job, side_engines, out, models.named(), fresh)
    origin = provenance("adaptive", models=models.named(), prompts=source)
    run_plan(plan, origin, partial(comparison, cells), render, dry_run)


def render(content: Content, out: Path) -> None:
    """Write one table per cell, and the plot of speed-ups over batch sizes."""
    rows = [Row.model_validate(row) for row in content["rows"]]
    report.write_markdown(out, "Benchmark", tables(rows), content)
    points = [
        {
            "batch size": row.cell.batch_size,
            "speed-up over plain": row.speedup,
            "side": row.side,
            "temperature": f"temperature {row.cell.temperature:g}",
        }
        for row in rows
    ]
    plot.line_panels(
        points,
        out / "results.png",
        x="batch size",
        y="speed-up over plain",
        hue="side",
        col="temperature",
        log_x=True,
        level=1,
    )
