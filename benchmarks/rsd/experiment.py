"""The evidence of the RSD paper (arXiv 2402.14160), with our pair of models."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Annotated

import typer

from benchmarks.harness import options
from benchmarks.harness.experiment import PaperOptions, Run, experiment
from benchmarks.harness.models import find_models, num_parameters, take_prompts
from benchmarks.harness.plan import Engine, Plan, base_job, without_engines
from benchmarks.harness.report import Content
from benchmarks.harness.rescoring import rescoring_plan, split_scores
from benchmarks.rsd.law import Cells, comparisons
from benchmarks.rsd.metrics import best_of, rows_of
from benchmarks.rsd.report import render
from benchmarks.rsd.trees import EXPERIMENTS, Tree, all_trees
from vllm_treespec.tools.sides import PLAIN, Cell, Side, plain_side, side_of_trees

__all__ = ["render", "rsd"]

PARTS = ("toy", *EXPERIMENTS)


@dataclass(frozen=True)
class Options(PaperOptions):
    """Options of ``rsd``."""

    parts: Annotated[str, typer.Option(help=f"Some of {','.join(PARTS)}.")] = ",".join(
        PARTS
    )
    max_tokens: options.MaxTokens = 48
    temperatures: options.Temperatures = "0.3,1"
    sides: options.Names = ""
    plain_rounds: Annotated[
        int, typer.Option(min=1, help="Rounds of plain decoding.")
    ] = 8
    batch_size: Annotated[int, typer.Option(min=1, help="Requests at a time.")] = 1


@experiment
def rsd(asked: Options) -> Run | None:
    """Redo the RSD paper's toy figure and experiments 1 and 2, with tests."""
    chosen = options.words(asked.parts, "--parts", PARTS)
    experiments = [part for part in chosen if part in EXPERIMENTS]
    trees = choose(all_trees(experiments), options.words(asked.sides))
    models = find_models(asked.target, asked.draft)
    if models.draft is None:
        raise ValueError("--draft: the trees need a draft model; name one")
    ratio = num_parameters(models.draft) / num_parameters(models.target)
    plain = [
        Cell(batch_size=asked.batch_size, temperature=temperature)
        for temperature in options.numbers(
            asked.temperatures, "--temperatures", float, 0
        )
    ]
    prompts, source = take_prompts(asked.prompts, asked.num_prompts)
    if "toy" in chosen and not asked.dry_run:
        from benchmarks.rsd import toy

        toy.write(toy.compute(), asked.out)
        options.console.print(f"wrote {asked.out}/toy.json, toy.md and toy.png")
    if not trees:
        return None
    return Run(
        job=base_job(models.target, prompts, asked.max_tokens),
        engines=[
            Engine(plain_side(PLAIN, eager=True), plain, asked.plain_rounds),
            *engines_of(trees, models.draft, plain, asked.rounds),
        ],
        models=models,
        prompts=source,
        contents=lambda plan, found: evidence(plan, experiments, ratio, found),
        render=render,
        origin={
            "draft size / target size": round(ratio, 5),
            "batch size": asked.batch_size,
            "tokens per answer, at most": asked.max_tokens,
            "scipy": version("scipy"),
        },
        then=scoring,
    )


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
    plan: Plan, experiments: Sequence[str], size_ratio: float, finished: Cells
) -> Content:
    """Make what results.json holds."""
    cells, scores = split_scores(plan, finished)
    rows = rows_of(cells, size_ratio)
    return {
        "rows": rows,
        "best": [point for part in experiments for point in best_of(rows, part)],
        "law": comparisons(cells, scores),
        "scores": scores,
        "runs": without_engines(cells),
    }
