"""The evidence of the Lyanna paper (arXiv 2602.21224), on vLLM."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.eagle.trainings import read_trainings
from benchmarks.harness import options
from benchmarks.harness import plan as plans
from benchmarks.harness.models import identity, models_of, take_prompts
from benchmarks.harness.provenance import model, provenance
from benchmarks.harness.report import Content
from benchmarks.lyanna import parts
from benchmarks.lyanna.coverage import coverage_of
from benchmarks.lyanna.heads import full_twin, variant_of
from benchmarks.lyanna.report import render
from benchmarks.lyanna.rows import curves_of, evidence_of
from vllm_treespec.heads import LyannaHeadConfig, read_head_config
from vllm_treespec.tools.prompts import SHIPPED, spread
from vllm_treespec.tools.sides import choose_sides

__all__ = ["lyanna", "render"]

Variants = Annotated[
    list[str] | None,
    typer.Option(help="Folder of a Lyanna head for table 1. May be repeated."),
]
Trainings = Annotated[
    Path | None, typer.Option(help="Folder with trained heads: table 2, figure 5.")
]
Text = Annotated[
    Path | None, typer.Option(help="JSONL of `treespec train --text`: figure 7.")
]
Table1Prompts = Annotated[int, typer.Option(min=1, help="Prompts of table 1.")]


def lyanna(
    head: options.Head = "",
    eagle: options.Head = "",
    variants: Variants = None,
    trainings: Trainings = None,
    text: Text = None,
    prompts: options.PromptsFile = SHIPPED,
    num_prompts: options.NumPrompts = 16,
    table1_prompts: Table1Prompts = 48,
    tokens: options.MaxTokens = 64,
    batch_sizes: options.BatchSizes = "1,2,4,8,16",
    sides: options.Sides = "",
    rounds: options.Rounds = 3,
    stock_depth: options.StockDepth = 6,
    target: options.Target = "",
    draft: options.Draft = "",
    eager: options.Eager = False,
    out: options.Out = Path("runs/lyanna"),
    fresh: options.Fresh = False,
    dry_run: options.DryRun = False,
) -> None:
    """Redo tables 1 and 2 and figures 5, 7 to 13 of the Lyanna paper."""
    with options.one_line_errors("lyanna"):
        sizes = options.numbers(batch_sizes, "--batch-sizes", int, 1)
        trained = [] if trainings is None else read_trainings(trainings, by_step=True)
        named = {"lyanna": ("--head", head), "eagle": ("--eagle", eagle)}
        models = models_of(target, draft, named)
        more: Content = {
            "coverage": [] if text is None else coverage_of(text, models.target),
            "curves": curves_of(trained),
        }
        names = options.words(sides)
        heads = dict(models.heads)
        for kind, folder in models.heads.items():
            heads[f"{kind}-full"] = full_twin(kind, folder, models.target, out)
        own = [heads["lyanna"]] if "lyanna" in heads else []
        labels = labels_of([*own, *(variants or [])])
        every = parts.all_sides(models.draft, heads, list(labels), eager, stock_depth)
        chosen = [] if names == [options.NONE] else choose_sides(every, names)
        entries = parts.entries_of(every, sizes, num_prompts)
        asked, source = take_prompts(prompts, max(table1_prompts, num_prompts))
        first = spread(asked, num_prompts)
        asked = first + [prompt for prompt in asked if prompt not in first]
        job = plans.base_job(models.target, asked, tokens)
        engines = parts.engines_of(chosen, entries, rounds)
        weights = models.named()
        deciding = [weights["target"], weights.get("draft"), eager]
        identify = partial(identity, {f: model(f) for f in [*heads.values(), *labels]})
        plan = plans.make_plan(job, engines, out, deciding, fresh, identify)
    more |= {"labels": {parts.table1_name(f): said for f, said in labels.items()}}
    origin = provenance("lyanna", models=weights, prompts=source)
    origin["engines"] = "eager" if eager else "compiled"
    plans.run_plan(plan, origin, partial(evidence, entries, more), render, dry_run)


def labels_of(folders: Sequence[str]) -> dict[str, str]:
    """Say what each Lyanna head leaves out, by its folder.

    Raises:
        ValueError: when one is no Lyanna head, or two folders have one name.

    """
    labels: dict[str, str] = {}
    for folder in dict.fromkeys(folders):
        config = read_head_config(folder)
        if not isinstance(config, LyannaHeadConfig):
            raise ValueError(f"--variants: {folder} holds no lyanna head")
        if parts.table1_name(folder) in map(parts.table1_name, labels):
            raise ValueError(
                f"--variants: two folders have the name of {folder}; rename one"
            )
        labels[folder] = variant_of(config.model_dump())
    return labels


def evidence(
    entries: parts.Entries, more: Content, finished: Sequence[plans.StoredCell]
) -> Content:
    """Make what results.json holds; rounds are kept without their text."""
    without: Any = {"side": {"engine"}, "result": {"token_ids"}}
    runs = [stored.model_dump(mode="json", exclude=without) for stored in finished]
    return {**evidence_of(entries, finished), **more, "runs": runs}
