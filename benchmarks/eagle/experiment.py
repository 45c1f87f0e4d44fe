"""EAGLE and one-pass heads against other drafters: speed, steps and training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import typer

from benchmarks.eagle.parts import (
    DFLASH_TREES,
    EAGLE_TREES,
    REDRAFTER_TREES,
    all_sides,
    engines_of,
    entries_of,
    trees_by_kind,
)
from benchmarks.eagle.plain_step import plain_steps_of
from benchmarks.eagle.report import render
from benchmarks.eagle.trainings import Training, read_trainings
from benchmarks.harness import options
from benchmarks.harness.experiment import HeadOptions, Run, experiment
from benchmarks.harness.models import models_of, take_prompts
from benchmarks.harness.plan import StoredCell, base_job, without_text
from benchmarks.harness.report import Content
from benchmarks.harness.rows import Entry, rows_of

__all__ = ["eagle", "render"]


@dataclass(frozen=True)
class Options(HeadOptions):
    """Options of ``eagle``."""

    rounds: options.Rounds = 3
    redrafter: options.Head = ""
    medusa: options.Head = ""
    dflash: options.Head = ""
    temperatures: options.Temperatures = "0,1"
    trees: Annotated[str, typer.Option(help="top_k x depth x draft tokens.")] = (
        EAGLE_TREES
    )
    redrafter_trees: Annotated[
        str,
        typer.Option(help="Beam width x length x draft tokens, for the dynamic tree."),
    ] = REDRAFTER_TREES
    dflash_trees: Annotated[
        str, typer.Option(help="top_k x depth x draft tokens, of one-pass heads.")
    ] = DFLASH_TREES


@experiment
def eagle(asked: Options) -> Run:
    """Compare EAGLE's trees with other drafters; say what a step and training cost."""
    trained = read_trainings(asked.trainings) if asked.trainings else []
    shapes = trees_by_kind(asked.trees, asked.redrafter_trees, asked.dflash_trees)
    warmths = options.numbers(asked.temperatures, "--temperatures", float, 0)
    named = {
        "eagle": ("--head", asked.head),
        "redrafter": ("--redrafter", asked.redrafter),
        "medusa": ("--medusa", asked.medusa),
        "dflash": ("--dflash", asked.dflash),
    }
    models = models_of(asked.target, asked.draft, named)
    every = all_sides(models, shapes, asked.eager, asked.stock_depth)
    entries = entries_of(every, shapes, warmths)
    prompts, source = take_prompts(asked.prompts, asked.num_prompts)
    return Run(
        job=base_job(models.target, prompts, asked.max_tokens),
        engines=engines_of(asked.chosen(every), entries, len(prompts), asked.rounds),
        models=models,
        prompts=source,
        contents=lambda _, finished: evidence(entries, trained, finished),
        render=render,
        deciding=asked.eager,
        origin=asked.origin(),
        own_heads=list(models.heads.values()),
    )


def evidence(
    entries: Sequence[Entry],
    trainings: Sequence[Training],
    finished: Sequence[StoredCell],
) -> Content:
    """Make what results.json holds; rounds are kept without their text."""
    rows = rows_of(entries, finished)
    return {
        "rows": [row.model_dump(mode="json") for row in rows],
        "plain_steps": plain_steps_of(finished),
        "trainings": list(trainings),
        "runs": without_text(finished),
    }
