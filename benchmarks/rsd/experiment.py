"""The evidence of the RSD paper (arXiv 2402.14160), with our pair of models."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.harness import options
from benchmarks.harness.models import find_models, num_parameters, take_prompts
from benchmarks.harness.plan import Engine, Plan, base_job, make_plan, run_plan
from benchmarks.harness.provenance import provenance
from benchmarks.harness.report import Content
from benchmarks.harness.rescoring import rescoring_plan, split_scores
from benchmarks.rsd.law import Cells, comparisons
from benchmarks.rsd.metrics import best_of, rows_of
from benchmarks.rsd.references import load_references, text_scores
from benchmarks.rsd.report import render
from benchmarks.rsd.trees import EXPERIMENTS, Tree, all_trees
from vllm_treespec.tools.prompts import SHIPPED, spread
from vllm_treespec.tools.sides import PLAIN, Cell, Side, plain_side, side_of_trees

PARTS = ("toy", *EXPERIMENTS)
Parts = Annotated[str, typer.Option(help=f"Some of {','.join(PARTS)}.")]
PlainRounds = Annotated[int, typer.Option(min=1, help="Rounds of plain decoding.")]
BatchSize = Annotated[int, typer.Option(min=1, help="Requests at a time.")]
References = Annotated[str, typer.Option(help="Key of the file's reference texts.")]


def rsd(
    parts: Parts = "toy,lengths,budgets",
    prompts: options.PromptsFile = SHIPPED,
    num_prompts: options.NumPrompts = 8,
    max_tokens: options.MaxTokens = 48,
    temperatures: options.Temperatures = "0.3,1",
    sides: options.Names = "",
    rounds: options.Rounds = 1,
    plain_rounds: PlainRounds = 8,
    batch_size: BatchSize = 1,
    references: References = "",
    target: options.Target = "",
    draft: options.Draft = "",
    out: options.Out = Path("runs/rsd"),
    fresh: options.Fresh = False,
    dry_run: options.DryRun = False,
) -> None:
    """Redo the RSD paper's toy figure and experiments 1 and 2, with tests."""
    with options.one_line_errors("rsd"):
        chosen = options.words(parts, "--parts", PARTS)
        experiments = [part for part in chosen if part in EXPERIMENTS]
        trees = choose(all_trees(experiments), options.words(sides))
        models = find_models(target, draft)
        if models.draft is None:
            raise ValueError("--draft: the trees need a draft model; name one")
        ratio = num_parameters(models.draft) / num_parameters(models.target)
        plain = [
            Cell(batch_size=batch_size, temperature=temperature)
            for temperature in options.numbers(temperatures, "--temperatures", float, 0)
        ]
        engines = [
            Engine(plain_side(PLAIN, eager=True), plain, plain_rounds),
            *engines_of(trees, models.draft, plain, rounds),
        ]
        asked, source = take_prompts(prompts, num_prompts)
        texts = load_references(prompts, references) if references else []
        job = base_job(models.target, asked, max_tokens)
        plan = make_plan(job, engines, out, models.named(), fresh)
    origin = provenance("rsd", models=models.named(), prompts=source)
    origin["versions"]["scipy"] = version("scipy")
    origin["draft size / target size"] = round(ratio, 5)
    origin |= {"batch size": batch_size, "tokens per answer, at most": max_tokens}
    if "toy" in chosen and not dry_run:
        from benchmarks.rsd import toy

        toy.write(toy.compute(), out)
        options.console.print(f"wrote {out}/toy.json, toy.md and toy.png")
    if trees:
        expected = spread(texts, num_prompts)
        contents = partial(evidence, plan, experiments, ratio, expected)
        run_plan(plan, origin, contents, render, dry_run, then=partial(scoring, plan))


def choose(trees: Sequence[Tree], names: Sequence[str]) -> list[Tree]:
    """Keep the named trees or methods; all when nothing is named."""
    for name in names:
        if not any(name in (tree.name, tree.method) for tree in trees):
            there = ", ".join(tree.name for tree in trees)
            raise ValueError(f"--sides: there is no tree {name!r}; there are {there}")
    return [t for t in trees if not names or t.name in names or t.method in names]


def engines_of(
    trees: Sequence[Tree], draft: str, plain: Sequence[Cell], rounds: int
) -> list[Engine]:
    """Make the engine of each method, which measures its trees as ``plain`` says."""
    cells: dict[str, list[Cell]] = {}
    for tree in trees:
        mine = [cell.model_copy(update={"tree": tree.shape}) for cell in plain]
        cells.setdefault(tree.method, []).extend(mine)
    return [Engine(side_of(m, draft), mine, rounds) for m, mine in cells.items()]


def side_of(method: str, draft: str) -> Side:
    """Make the side whose engine can go through all trees of a method."""
    trees = [tree for tree in all_trees() if tree.method == method]
    largest = max(trees, key=lambda tree: tree.num_drafts)
    shapes = [tree.shape for tree in trees]
    spec = largest.spec_config(draft)
    return side_of_trees(method, spec, shapes, enforce_eager=True)


def scoring(plan: Plan, finished: Cells) -> Plan:
    """Plan what scores the finished answers."""
    return rescoring_plan(plan, split_scores(plan, finished)[0])


def evidence(
    plan: Plan,
    experiments: Sequence[str],
    size_ratio: float,
    references: Sequence[str],
    finished: Cells,
) -> Content:
    """Make what results.json holds; ``references`` are empty, or one a prompt."""
    cells, scores = split_scores(plan, finished)
    rows = rows_of(cells, size_ratio)
    target = plan.job.target
    without = {"side": {"engine"}}
    return {
        "rows": rows,
        "best": [point for part in experiments for point in best_of(rows, part)],
        "law": comparisons(cells, scores),
        "texts": text_scores(cells, references, target) if references else [],
        "scores": scores,
        "runs": [c.model_dump(mode="json", exclude=without) for c in cells],
    }
