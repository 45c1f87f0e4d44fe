"""The benchmark: every side in a fresh engine, in turn, several rounds.

    python -m benchmarks.run --prompts FILE.jsonl --out DIR

README.md beside this file says what is measured and how.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from benchmarks import plot, report
from benchmarks.provenance import commit, model, provenance, sha256
from benchmarks.rounds import Plan, execute, finished_runs, rows_of
from benchmarks.sides import (
    PAPER_TREES,
    choose,
    stock_sides,
    tree_sides,
    tree_specs,
)
from vllm_treespec.assets import AssetError, ensure_target
from vllm_treespec.compare import Cell, shipped_drafter
from vllm_treespec.prompts import SHIPPED, load_prompts, spread

console = Console(stderr=True, soft_wrap=True)


PromptsFile = Annotated[
    Path, typer.Option(help="JSONL with prompt, question, instruction or turns.")
]
NumPrompts = Annotated[int, typer.Option(min=1, help="Taken at even distances.")]
BatchSizes = Annotated[str, typer.Option(help="Requests at a time, comma-separated.")]
Temperatures = Annotated[str, typer.Option(help="Comma-separated.")]
Budgets = Annotated[str, typer.Option(help="Draft tokens, comma-separated.")]
Trees = Annotated[
    str, typer.Option(help="`one` RSD-C and one RSD-S tree per budget, or `all`.")
]
Specs = Annotated[
    list[str] | None,
    typer.Option(help="One more spec-config as JSON; the draft model is filled in."),
]
Names = Annotated[
    str, typer.Option(help="Only these names or families, comma-separated.")
]
Rounds = Annotated[int, typer.Option(min=1)]
MaxTokens = Annotated[int, typer.Option(min=2, help="Per answer.")]
StockDepth = Annotated[
    int, typer.Option(min=1, help="Draft tokens of stock ngram and draft_model.")
]
Engines = Annotated[
    str, typer.Option(help="How speculative sides run: eager, compiled or both.")
]
Target = Annotated[str, typer.Option(help="Default: the demo's target model.")]
Draft = Annotated[str, typer.Option(help="Default: the shipped draft model.")]
Out = Annotated[Path, typer.Option(help="For results; finished runs are kept.")]
Fresh = Annotated[bool, typer.Option("--fresh", help="Forget finished runs.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Only print the plan.")]


def run(
    prompts: PromptsFile = SHIPPED,
    num_prompts: NumPrompts = 8,
    batch_sizes: BatchSizes = "1,8",
    temperatures: Temperatures = "0,1",
    budgets: Budgets = "6,10,14,21,30",
    trees: Trees = "one",
    spec: Specs = None,
    sides: Names = "",
    rounds: Rounds = 1,
    max_tokens: MaxTokens = 96,
    stock_depth: StockDepth = 6,
    engines: Engines = "eager",
    target: Target = "",
    draft: Draft = "",
    out: Out = Path("runs/benchmark"),
    fresh: Fresh = False,
    dry_run: DryRun = False,
) -> None:
    """Compare stock vLLM and draft trees: JSON, Markdown table, plot."""
    try:
        target = target or str(ensure_target())
        draft = draft or shipped_drafter()
        specs = tree_specs(known_budgets(budgets), all_trees(trees))
        specs += [spec_of(text) for text in spec or []]
        modes = eager_modes(engines)
        models = {"target": model(target), "draft": model(draft)}
        plan = Plan(
            sides=choose(
                stock_sides(draft, stock_depth, modes)
                + tree_sides(specs, draft, modes),
                [name.strip() for name in sides.split(",") if name.strip()],
            ),
            rounds=rounds,
            cells=[
                Cell(batch_size=batch_size, temperature=temperature)
                for batch_size in numbers(batch_sizes, int, "--batch-sizes")
                for temperature in numbers(temperatures, float, "--temperatures")
            ],
            prompts=spread(load_prompts(prompts), num_prompts),
            target=target,
            max_tokens=max_tokens,
            out=out,
            models=json.dumps(models),
            commit=commit(),
        )
        if fresh:
            shutil.rmtree(out / "runs", ignore_errors=True)
        finished_runs(plan)
        origin = provenance(sys.argv[1:])
        origin["models"] = models
        origin["prompts"] = f"{len(plan.prompts)} of {prompts.name} ({sha256(prompts)})"
    except (AssetError, ValueError) as error:
        console.print(f"benchmark: {error}", markup=False)
        raise typer.Exit(1) from None
    print_plan(plan)
    if not dry_run and measure(plan, origin):
        raise typer.Exit(1)


def print_plan(plan: Plan) -> None:
    """Print the sides in turn and an estimate of the time."""
    console.print("sides: " + " ".join(side.name for side in plan.sides))
    console.print(
        f"{len(plan.todo())} runs to do, {len(plan.prompts)} prompts each, "
        f"about {plan.seconds() / 60:.0f} minutes on two idle cores"
    )


def measure(plan: Plan, origin: dict[str, Any]) -> dict[str, str]:
    """Run the plan and write the reports; returns why sides failed, by name."""
    failed = execute(
        plan, console, after_run=lambda failed: write_reports(plan, origin, failed)
    )
    write_reports(plan, origin, failed)
    console.print(f"wrote {plan.out}/results.json, results.md and results.png")
    return failed


def known_budgets(text: str) -> list[int]:
    """Read budgets; ValueError for one the paper has no trees of."""
    budgets = numbers(text, int, "--budgets")
    for budget in budgets:
        if budget not in PAPER_TREES:
            known = ", ".join(map(str, PAPER_TREES))
            raise ValueError(
                f"--budgets: the paper has no trees of {budget} draft tokens, only of "
                f"{known}; give your tree with --spec"
            )
    return budgets


def all_trees(text: str) -> bool:
    """Read `--trees`."""
    if text not in ("one", "all"):
        raise ValueError(f"--trees is {text!r}; write one or all")
    return text == "all"


def eager_modes(text: str) -> list[bool]:
    """Read `--engines`: which values of enforce_eager to run."""
    modes = {"eager": [True], "compiled": [False], "both": [True, False]}
    if text not in modes:
        raise ValueError(f"--engines is {text!r}; write eager, compiled or both")
    return modes[text]


def spec_of(text: str) -> dict[str, Any]:
    """Read one `--spec`."""
    try:
        spec = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"--spec {text!r} is not JSON: {error}") from None
    if not isinstance(spec, dict):
        raise ValueError(f"--spec {text!r} must be one JSON object")
    return spec


def write_reports(plan: Plan, origin: dict[str, Any], failed: dict[str, str]) -> None:
    """Write results.json, results.md and results.png from all finished runs."""
    runs = finished_runs(plan)
    rows = rows_of(plan, runs)
    origin = {**origin, "commits": sorted({str(run.commit) for run in runs})}
    without_text = {"result": {"cells": {"__all__": {"token_ids"}}}}
    content = {
        "provenance": origin,
        "failed": failed,
        "rows": [row.model_dump(mode="json") for row in rows],
        "runs": [run.model_dump(mode="json", exclude=without_text) for run in runs],
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
        raise ValueError(f"{option}: {text!r} is no list of numbers") from None


if __name__ == "__main__":
    typer.run(run)
