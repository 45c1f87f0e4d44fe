"""The benchmark: every side in a fresh engine, in turn, several rounds.

    python -m benchmarks.run --prompts FILE.jsonl --out DIR
    python -m benchmarks.run --workloads all --workload-data FOLDER --out DIR

README.md beside this file says what is measured and how.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from benchmarks import plot, report, workload_report
from benchmarks.provenance import commit, model, provenance, sha256
from benchmarks.rounds import Plan, execute, finished_runs, rows_of
from benchmarks.sides import (
    PAPER_TREES,
    choose,
    stock_sides,
    tree_sides,
    tree_specs,
)
from benchmarks.workload_sides import workload_cells, workload_sides
from benchmarks.workloads import load_workloads
from vllm_treespec.heads import read_head_config
from vllm_treespec.tools.assets import AssetError, ensure_target
from vllm_treespec.tools.prompts import SHIPPED, load_prompts, spread
from vllm_treespec.tools.sides import MEDUSA, REDRAFTER, Cell, shipped_drafter

console = Console(stderr=True, soft_wrap=True)


PromptsFile = Annotated[
    Path, typer.Option(help="JSONL with prompt, question, instruction or turns.")
]
NumPrompts = Annotated[int, typer.Option(min=1, help="Taken at even distances.")]
ModeNumPrompts = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Default 8, at even distances; with --workloads 3 each at batch size 1.",
    ),
]
ModeBatchSizes = Annotated[
    str, typer.Option(help="Default 1,8; with --workloads 1,4,16.")
]
ModeMaxTokens = Annotated[
    int | None,
    typer.Option(min=2, help="Per answer. Default 96; with --workloads 64."),
]
Workloads = Annotated[
    str,
    typer.Option(
        help="Make the workload table: all, or chat,code,mathematics,editing,reading."
    ),
]
WorkloadData = Annotated[
    Path | None,
    typer.Option(
        help="Folder with the data sets' files, or JSONL with workload and prompt."
    ),
]
BatchSizes = Annotated[str, typer.Option(help="Requests at a time, comma-separated.")]
Temperatures = Annotated[str, typer.Option(help="Comma-separated.")]
Budgets = Annotated[str, typer.Option(help="Draft tokens, comma-separated.")]
Trees = Annotated[
    str, typer.Option(help="`one` RSD-C and one RSD-S tree per budget, or `all`.")
]
Specs = Annotated[
    list[str] | None,
    typer.Option(
        help="One more spec-config as JSON, its model is filled in; with --workloads "
        "instead of the usual ones."
    ),
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
ModeDraft = Annotated[
    str | None,
    typer.Option(
        help="Default: the shipped draft model, for the demo's target only; none: no "
        "draft model."
    ),
]
Heads = Annotated[
    list[str] | None,
    typer.Option(help="Folder of a head; with --workloads the shipped ones otherwise."),
]
Out = Annotated[Path, typer.Option(help="For results; finished runs are kept.")]
Fresh = Annotated[bool, typer.Option("--fresh", help="Forget finished runs.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Only print the plan.")]


@dataclass(frozen=True)
class Models:
    """The target and what drafts for it."""

    target: str
    # None: no draft model
    draft: str | None
    # folders by kind of head
    heads: dict[str, str]

    def named(self) -> dict[str, dict[str, str]]:
        """Names and SHA-256 of the weights."""
        folders = {"target": self.target, "draft": self.draft, **self.heads}
        return {key: model(folder) for key, folder in folders.items() if folder}


@dataclass(frozen=True)
class Grid:
    """The cells' batch sizes and temperatures."""

    batch_sizes: list[int]
    temperatures: list[float]


@dataclass(frozen=True)
class Asked:
    """What is asked in which cells."""

    cells: list[Cell]
    prompts: list[str]
    workloads: dict[str, list[str]]
    # for the reports
    origin: str


def run(
    prompts: PromptsFile = SHIPPED,
    num_prompts: ModeNumPrompts = None,
    batch_sizes: ModeBatchSizes = "",
    temperatures: Temperatures = "0,1",
    budgets: Budgets = "6,10,14,21,30",
    trees: Trees = "one",
    spec: Specs = None,
    sides: Names = "",
    rounds: Rounds = 1,
    max_tokens: ModeMaxTokens = None,
    stock_depth: StockDepth = 6,
    engines: Engines = "eager",
    target: Target = "",
    draft: ModeDraft = None,
    head: Heads = None,
    workloads: Workloads = "",
    workload_data: WorkloadData = None,
    out: Out = Path("runs/benchmark"),
    fresh: Fresh = False,
    dry_run: DryRun = False,
) -> None:
    """Compare stock vLLM and draft trees: JSON, Markdown table, plot."""
    try:
        models = models_of(target, draft, head or [], shipped_heads=bool(workloads))
        specs = [spec_of(text) for text in spec or []]
        modes = eager_modes(engines)
        sizes = batch_sizes or ("1,4,16" if workloads else "1,8")
        grid = Grid(
            numbers(sizes, int, "--batch-sizes"),
            numbers(temperatures, float, "--temperatures"),
        )
        if workloads:
            asked = ask_workloads(workloads, workload_data, num_prompts or 3, grid)
            all_sides = workload_sides(
                specs, models.draft, models.heads, stock_depth, modes
            )
        else:
            asked = ask_prompts(prompts, num_prompts or 8, grid)
            if models.draft:
                specs = tree_specs(known_budgets(budgets), all_trees(trees)) + specs
            all_sides = stock_sides(models.draft, stock_depth, modes)
            all_sides += tree_sides(specs, models.draft, modes, models.heads)
        plan = Plan(
            sides=choose(all_sides, parts(sides)),
            rounds=rounds,
            cells=asked.cells,
            prompts=asked.prompts,
            target=models.target,
            max_tokens=max_tokens or (64 if workloads else 96),
            out=out,
            models=json.dumps(models.named()),
            commit=commit(),
            workloads=asked.workloads,
        )
        if fresh:
            shutil.rmtree(out / "runs", ignore_errors=True)
        finished_runs(plan)
        origin = provenance(sys.argv[1:])
        origin |= {"models": models.named(), "prompts": asked.origin}
    except (AssetError, ValueError) as error:
        console.print(f"benchmark: {error}", markup=False)
        raise typer.Exit(1) from None
    print_plan(plan)
    if not dry_run and measure(plan, origin):
        raise typer.Exit(1)


def models_of(
    target: str, draft: str | None, head_folders: list[str], shipped_heads: bool
) -> Models:
    """Find the models; the shipped ones serve the demo's target only.

    Raises:
        ValueError: when another target has no `--draft`, or a head is none.

    """
    heads: dict[str, str] = {
        read_head_config(Path(folder)).method: folder for folder in head_folders
    }
    if target and draft is None:
        raise ValueError(
            f"--draft: the shipped draft model is not for {target}; name one that is, "
            "or write --draft none"
        )
    if not target:
        target = str(ensure_target())
        draft = shipped_drafter() if draft is None else draft
        if shipped_heads:
            shipped = {"redrafter": REDRAFTER, "medusa": MEDUSA}
            heads = {
                kind: shipped_drafter(name) for kind, name in shipped.items()
            } | heads
    return Models(target, None if draft in ("", "none") else draft, heads)


def ask_prompts(file: Path, count: int, grid: Grid) -> Asked:
    """Ask prompts of one file, all in every cell."""
    prompts = spread(load_prompts(file), count)
    cells = [
        Cell(batch_size=batch_size, temperature=temperature)
        for batch_size in grid.batch_sizes
        for temperature in grid.temperatures
    ]
    return Asked(cells, prompts, {}, f"{len(prompts)} of {file.name} ({sha256(file)})")


def ask_workloads(text: str, data: Path | None, count: int, grid: Grid) -> Asked:
    """Ask workloads, each in cells of its own."""
    if data is None:
        raise ValueError("--workloads needs --workload-data: a folder or a JSONL file")
    chosen = [] if text == "all" else parts(text)
    workloads = load_workloads(data, chosen, max(count, *grid.batch_sizes))
    cells = workload_cells(list(workloads), grid.batch_sizes, grid.temperatures, count)
    told = hashlib.sha256(json.dumps(workloads).encode()).hexdigest()
    counts = ", ".join(f"{len(found)} {name}" for name, found in workloads.items())
    return Asked(cells, [], workloads, f"{counts} of {data.name} ({told})")


def print_plan(plan: Plan) -> None:
    """Print the sides in turn and an estimate of the time."""
    console.print("sides: " + " ".join(side.name for side in plan.sides))
    console.print(
        f"{len(plan.todo())} runs to do, {len(plan.cells)} cells each, about "
        f"{plan.seconds() / 60:.0f} minutes on two idle cores with a 135M target"
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
    written = workload_report if plan.workloads else report
    (plan.out / "results.md").write_text(written.markdown(rows, failed, origin))
    if rows:
        draw = plot.draw_workloads if plan.workloads else plot.draw
        draw(rows, plan.out / "results.png")


def parts(text: str) -> list[str]:
    """Read comma-separated names."""
    return [name.strip() for name in text.split(",") if name.strip()]


def numbers(text: str, kind: type[Any], option: str) -> list[Any]:
    """Read a comma-separated list."""
    try:
        return [kind(part) for part in text.split(",") if part.strip()]
    except ValueError:
        raise ValueError(f"{option}: {text!r} is no list of numbers") from None


if __name__ == "__main__":
    typer.run(run)
