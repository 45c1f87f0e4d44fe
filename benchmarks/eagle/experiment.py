"""EAGLE heads: against other drafters, what a step costs, and how they were trained."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.eagle.parts import (
    EAGLE_TREES,
    REDRAFTER_TREES,
    all_sides,
    engines_of,
    entries_of,
    trees_by_kind,
)
from benchmarks.eagle.report import render
from benchmarks.eagle.rows import plain_steps_of
from benchmarks.eagle.trainings import Training, read_trainings
from benchmarks.harness import options
from benchmarks.harness.head_rows import Entry, rows_of
from benchmarks.harness.models import identity, models_of, take_prompts
from benchmarks.harness.plan import StoredCell, base_job, make_plan, run_plan
from benchmarks.harness.provenance import provenance
from benchmarks.harness.report import Content
from vllm_treespec.tools.prompts import SHIPPED
from vllm_treespec.tools.sides import choose_sides

__all__ = ["eagle", "render"]

Trees = Annotated[str, typer.Option(help="top_k x depth x draft tokens.")]
BeamTrees = Annotated[
    str, typer.Option(help="Beam width x length x draft tokens, for the dynamic tree.")
]
Trainings = Annotated[
    Path | None,
    typer.Option(
        help="Folder with trained heads: training.json, and beside it evaluation.json "
        "of `treespec train evaluate --json`, if there is one."
    ),
]


def eagle(
    head: options.Head = "",
    redrafter: options.Head = "",
    medusa: options.Head = "",
    prompts: options.PromptsFile = SHIPPED,
    num_prompts: options.NumPrompts = 8,
    tokens: options.MaxTokens = 64,
    temperatures: options.Temperatures = "0,1",
    trees: Trees = EAGLE_TREES,
    redrafter_trees: BeamTrees = REDRAFTER_TREES,
    sides: options.Sides = "",
    rounds: options.Rounds = 3,
    stock_depth: options.StockDepth = 6,
    trainings: Trainings = None,
    target: options.Target = "",
    draft: options.Draft = "",
    eager: options.Eager = False,
    out: options.Out = Path("runs/eagle"),
    fresh: options.Fresh = False,
    dry_run: options.DryRun = False,
) -> None:
    """Compare EAGLE's trees with other drafters; say what a step and training cost."""
    with options.one_line_errors("eagle"):
        trained = [] if trainings is None else read_trainings(trainings)
        shapes = trees_by_kind(trees, redrafter_trees)
        warmths = options.numbers(temperatures, "--temperatures", float, 0)
        named = {
            "eagle": ("--head", head),
            "redrafter": ("--redrafter", redrafter),
            "medusa": ("--medusa", medusa),
        }
        models = models_of(target, draft, named)
        every = all_sides(models, shapes, eager, stock_depth)
        names = options.words(sides)
        chosen = [] if names == [options.NONE] else choose_sides(every, names)
        entries = entries_of(every, shapes, warmths)
        asked, source = take_prompts(prompts, num_prompts)
        job = base_job(models.target, asked, tokens)
        engines = engines_of(chosen, entries, len(asked), rounds)
        weights = models.named()
        deciding = [weights["target"], weights.get("draft"), eager]
        identify = partial(identity, {f: weights[k] for k, f in models.heads.items()})
        plan = make_plan(job, engines, out, deciding, fresh, identify)
    origin = provenance("eagle", models=weights, prompts=source)
    origin["engines"] = "eager" if eager else "compiled"
    run_plan(plan, origin, partial(evidence, entries, trained), render, dry_run)


def evidence(
    entries: Sequence[Entry],
    trainings: Sequence[Training],
    finished: Sequence[StoredCell],
) -> Content:
    """Make what results.json holds; rounds are kept without their text."""
    without = {"side": {"engine"}, "result": {"token_ids"}}
    rows = rows_of(entries, finished)
    return {
        "rows": [row.model_dump(mode="json") for row in rows],
        "plain_steps": plain_steps_of(finished),
        "trainings": list(trainings),
        "runs": [c.model_dump(mode="json", exclude=without) for c in finished],
    }
