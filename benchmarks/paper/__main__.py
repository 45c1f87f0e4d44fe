"""The evidence of the RSD paper (arXiv 2402.14160), with our pair of models.

    python -m benchmarks.paper --prompts FILE.jsonl --out DIR

benchmarks/README.md says what is measured and how.
"""

from __future__ import annotations

import json
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from benchmarks.paper import plot, report, toy
from benchmarks.paper.experiments import (
    Plan,
    execute,
    finished_runs,
    finished_scores,
)
from benchmarks.paper.law import comparisons, samples_of
from benchmarks.paper.metrics import best_of, num_parameters, rows_of
from benchmarks.paper.references import (
    check_packages,
    load_references,
    text_scores,
)
from benchmarks.paper.trees import EXPERIMENTS, METHODS, Tree, trees_of
from benchmarks.provenance import commit, model, provenance, sha256
from benchmarks.run import (
    Draft,
    DryRun,
    MaxTokens,
    Names,
    NumPrompts,
    PromptsFile,
    Rounds,
    Target,
    Temperatures,
    numbers,
)
from vllm_treespec.tools.assets import AssetError, ensure_target
from vllm_treespec.tools.prompts import SHIPPED, load_prompts, spread
from vllm_treespec.tools.sides import shipped_drafter

console = Console(stderr=True, soft_wrap=True)
PARTS = ("toy", *EXPERIMENTS)
ALL_PARTS = ",".join(PARTS)

Parts = Annotated[str, typer.Option(help=f"Some of {ALL_PARTS}.")]
PlainRounds = Annotated[
    int, typer.Option(min=1, help="Rounds of plain decoding, for the two-sample tests.")
]
BatchSize = Annotated[int, typer.Option(min=1, help="Requests at a time.")]
References = Annotated[
    str, typer.Option(help="Key of the prompt file's reference texts.")
]
Out = Annotated[Path, typer.Option(help="For results; finished trees are kept.")]


def paper(
    parts: Parts = ALL_PARTS,
    prompts: PromptsFile = SHIPPED,
    num_prompts: NumPrompts = 8,
    max_tokens: MaxTokens = 48,
    temperatures: Temperatures = "0.3,1",
    sides: Names = "",
    rounds: Rounds = 1,
    plain_rounds: PlainRounds = 8,
    batch_size: BatchSize = 1,
    references: References = "",
    target: Target = "",
    draft: Draft = "",
    out: Out = Path("runs/paper"),
    dry_run: DryRun = False,
) -> None:
    """Reproduce the toy figure and experiments 1 and 2: tables, plots, tests."""
    try:
        chosen = known_parts(parts)
        target = target or str(ensure_target())
        draft = draft or shipped_drafter()
        models = {"target": model(target), "draft": model(draft)}
        ratio = num_parameters(draft) / num_parameters(target)
        plan = Plan(
            trees=choose(all_trees(chosen), split(sides)),
            temperatures=numbers(temperatures, float, "--temperatures"),
            rounds=rounds,
            plain_rounds=plain_rounds,
            prompts=spread(load_prompts(prompts), num_prompts),
            target=target,
            draft=draft,
            max_tokens=max_tokens,
            batch_size=batch_size,
            out=out,
            models=json.dumps(models),
            commit=commit(),
        )
        finished_runs(plan)
        expected: list[str] = []
        if references:
            check_packages()
            expected = spread(load_references(prompts, references), num_prompts)
    except (AssetError, ValueError) as error:
        console.print(f"paper: {error}", markup=False)
        raise typer.Exit(1) from None
    origin = origin_of(plan, prompts, models, ratio)
    if plan.trees:
        print_plan(plan)
    if dry_run:
        return
    if "toy" in chosen:
        write_toy(out)
    if plan.trees and measure(plan, chosen, origin, ratio, expected):
        raise typer.Exit(1)


def origin_of(
    plan: Plan, prompts: Path, models: dict[str, Any], ratio: float
) -> dict[str, Any]:
    """Say where the results come from."""
    origin = provenance(sys.argv[1:], "benchmarks.paper")
    origin["versions"]["scipy"] = version("scipy")
    return {
        **origin,
        "models": models,
        "draft size / target size": round(ratio, 5),
        "prompts": f"{len(plan.prompts)} of {prompts.name} ({sha256(prompts)})",
        "batch size": plan.batch_size,
        "tokens per answer, at most": plan.max_tokens,
    }


def known_parts(text: str) -> list[str]:
    """Read `--parts`."""
    parts = split(text)
    for part in parts:
        if part not in PARTS:
            raise ValueError(f"--parts: there is no {part!r}; there are {ALL_PARTS}")
    return parts


def split(text: str) -> list[str]:
    """Read a comma-separated list of words."""
    return [part.strip() for part in text.split(",") if part.strip()]


def all_trees(parts: list[str]) -> list[Tree]:
    """Trees of the experiments, one method after the other, each once."""
    trees = [
        tree
        for part in parts
        if part in EXPERIMENTS
        for size_trees in trees_of(part).values()
        for tree in size_trees
    ]
    return sorted(dict.fromkeys(trees), key=lambda tree: METHODS.index(tree.method))


def choose(trees: list[Tree], names: list[str]) -> list[Tree]:
    """Keep the named trees or methods; all when nothing is named."""
    for name in names:
        if not any(name in (tree.name, tree.method) for tree in trees):
            known = ", ".join(tree.name for tree in trees)
            raise ValueError(f"--sides: there is no tree {name!r}; there are {known}")
    return [t for t in trees if not names or t.name in names or t.method in names]


def print_plan(plan: Plan) -> None:
    """Print the trees and an estimate of the time."""
    console.print("trees: " + " ".join(tree.name for tree in plan.trees))
    todo = plan.todo()
    console.print(
        f"{sum(map(len, todo))} runs to do in {len(todo)} engines, "
        f"{len(plan.unscored())} to rescore, {len(plan.prompts)} prompts each, "
        f"about {plan.seconds() / 60:.0f} minutes on two idle cores"
    )


def write_toy(out: Path) -> None:
    """Compute and write the toy figure."""
    toy.write(toy.compute(), out)
    console.print(f"wrote {out}/toy.json, toy.md and toy.png")


def measure(
    plan: Plan,
    parts: list[str],
    origin: dict[str, Any],
    ratio: float,
    references: list[str],
) -> dict[str, str]:
    """Run the plan and write the reports; returns why engines failed, by name."""
    failed = execute(plan)
    for reason in failed.values():
        console.print(f"failed: {reason}", markup=False)
    write_reports(plan, parts, origin, ratio, references, failed)
    console.print(f"wrote results.json, results.md and plots to {plan.out}")
    return failed


def write_reports(
    plan: Plan,
    parts: list[str],
    origin: dict[str, Any],
    ratio: float,
    references: list[str],
    failed: dict[str, str],
) -> None:
    """Write results.json, results.md and one plot per experiment."""
    runs = finished_runs(plan)
    origin = {**origin, "commits": sorted({str(run.commit) for run in runs})}
    rows = rows_of(runs, ratio)
    best = [
        point
        for part in parts
        if part in EXPERIMENTS
        for point in best_of(rows, part, trees_of(part))
    ]
    law = comparisons(samples_of(runs, finished_scores(plan)))
    texts = text_scores(runs, references, plan.target) if references else []
    content = {
        "provenance": origin,
        "failed": failed,
        **{
            name: [item.model_dump(mode="json") for item in items]
            for name, items in (
                ("rows", rows),
                ("best", best),
                ("law", law),
                ("texts", texts),
                ("runs", runs),
            )
        },
    }
    plan.out.mkdir(parents=True, exist_ok=True)
    (plan.out / "results.json").write_text(json.dumps(content) + "\n")
    text = report.markdown(rows, best, law, texts, failed, origin)
    (plan.out / "results.md").write_text(text)
    for experiment in dict.fromkeys(point.experiment for point in best):
        here = [point for point in best if point.experiment == experiment]
        plot.draw(here, experiment, plan.out / f"{experiment}.png")


if __name__ == "__main__":
    typer.run(paper)
