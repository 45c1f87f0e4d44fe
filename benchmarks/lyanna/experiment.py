"""The evidence of the Lyanna paper (arXiv 2602.21224), on vLLM."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.eagle.trainings import read_trainings
from benchmarks.harness import options
from benchmarks.harness.experiment import HeadOptions, Run, experiment
from benchmarks.harness.models import models_of, take_prompts
from benchmarks.harness.plan import StoredCell, base_job, without_text
from benchmarks.harness.report import Content
from benchmarks.harness.rows import Entry
from benchmarks.lyanna import parts
from benchmarks.lyanna.coverage import coverage_of
from benchmarks.lyanna.heads import full_twin, variant_of
from benchmarks.lyanna.report import render
from benchmarks.lyanna.rows import curves_of, evidence_of
from vllm_treespec.heads import LyannaHeadConfig, read_head_config
from vllm_treespec.tools.prompts import spread

__all__ = ["lyanna", "render"]


@dataclass(frozen=True)
class Options(HeadOptions):
    """Options of ``lyanna``."""

    num_prompts: options.NumPrompts = 16
    rounds: options.Rounds = 3
    eagle: options.Head = ""
    variants: Annotated[
        list[str] | None,
        typer.Option(help="Folder of a Lyanna head for table 1. May be repeated."),
    ] = None
    text: Annotated[
        Path | None, typer.Option(help="JSONL of `treespec train --text`: figure 7.")
    ] = None
    table1_prompts: Annotated[int, typer.Option(min=1, help="Prompts of table 1.")] = 48
    batch_sizes: options.BatchSizes = "1,2,4,8,16"


@experiment
def lyanna(asked: Options) -> Run:
    """Redo tables 1 and 2 and figures 5, 7 to 13 of the Lyanna paper."""
    sizes = options.numbers(asked.batch_sizes, "--batch-sizes", int, 1)
    trained = read_trainings(asked.trainings, by_step=True) if asked.trainings else []
    named = {"lyanna": ("--head", asked.head), "eagle": ("--eagle", asked.eagle)}
    models = models_of(asked.target, asked.draft, named)
    heads = dict(models.heads)
    for kind, folder in models.heads.items():
        heads[f"{kind}-full"] = full_twin(kind, folder, models.target, asked.out)
    own = [heads["lyanna"]] if "lyanna" in heads else []
    labels = labels_of([*own, *(asked.variants or [])])
    more: Content = {
        "coverage": coverage_of(asked.text, models.target) if asked.text else [],
        "curves": curves_of(trained),
        "labels": {parts.table1_name(folder): said for folder, said in labels.items()},
    }
    every = parts.all_sides(
        models.draft, heads, list(labels), asked.eager, asked.stock_depth
    )
    entries = parts.entries_of(every, sizes, asked.num_prompts)
    count = max(asked.table1_prompts, asked.num_prompts)
    prompts, source = take_prompts(asked.prompts, count)
    first = spread(prompts, asked.num_prompts)
    prompts = first + [prompt for prompt in prompts if prompt not in first]
    return Run(
        job=base_job(models.target, prompts, asked.max_tokens),
        engines=parts.engines_of(asked.chosen(every), entries, asked.rounds),
        models=models,
        prompts=source,
        contents=lambda _, finished: evidence(entries, more, finished),
        render=render,
        deciding=asked.eager,
        origin=asked.origin(),
        own_heads=[*heads.values(), *labels],
    )


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
    entries: Sequence[Entry], more: Content, finished: Sequence[StoredCell]
) -> Content:
    """Make what results.json holds; rounds are kept without their text."""
    runs = {"runs": without_text(finished)}
    return {**evidence_of(entries, finished), **more, **runs}
