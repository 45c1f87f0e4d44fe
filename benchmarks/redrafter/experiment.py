"""The evidence of the ReDrafter paper (arXiv 2403.09919), on vLLM."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.harness import models, options
from benchmarks.harness.experiment import PaperOptions, Run, experiment
from benchmarks.harness.plan import Engine, Plan, StoredCell, base_job, without_engines
from benchmarks.harness.report import Content
from benchmarks.harness.rescoring import rescoring_plan, split_scores
from benchmarks.redrafter.parts import (
    PARTS,
    SIDES,
    TABLES,
    Beams,
    Entry,
    Sizes,
    side_of,
)
from benchmarks.redrafter.report import render
from benchmarks.redrafter.rows import Evidence
from vllm_treespec.heads import read_head_config
from vllm_treespec.tools.assets import ensure_target, shipped_drafter

__all__ = ["redrafter", "render"]


@dataclass(frozen=True)
class Options(PaperOptions):
    """Options of ``redrafter``."""

    only: Annotated[str, typer.Option(help=f"Some of {','.join(PARTS)}.")] = ",".join(
        PARTS
    )
    tree: Annotated[str, typer.Option(help="Beam width x length x draft tokens.")] = (
        "4x4x15"
    )
    redrafter: options.Head = ""
    medusa: options.Head = ""
    eager: options.Eager = False


@experiment
def redrafter(asked: Options) -> Run:
    """Redo tables 1 and 2 and figures 5 and 6 of the ReDrafter paper."""
    chosen = options.words(asked.only, "--only", PARTS)
    prompts, source = models.take_prompts(asked.prompts, asked.num_prompts)
    sizes = Sizes(beams_of(asked.tree), asked.max_tokens, len(prompts))
    entries = sizes.entries(chosen)
    heads = heads_of({"redrafter": asked.redrafter, "medusa": asked.medusa})
    named = models.Models(asked.target or str(ensure_target()), heads=heads)
    return Run(
        # every cell says how long its answers are
        job=base_job(named.target, prompts, max_tokens=2),
        engines=engines_of(sizes, entries, heads, asked.eager, asked.rounds),
        models=named,
        prompts=source,
        contents=lambda plan, found: evidence(plan, entries, heads, found),
        render=render,
        deciding=asked.eager,
        origin={"engines": "eager" if asked.eager else "compiled"},
        then=lambda plan, found: scoring(plan, entries, found),
    )


def beams_of(text: str) -> Beams:
    """Read `--tree`."""
    form = "beam width x length x draft tokens, as 4x4x15"
    try:
        return Beams(*map(int, text.split("x")))
    except (TypeError, ValueError):
        raise ValueError(f"--tree is {text!r}; write {form}") from None


def heads_of(named: Mapping[str, str]) -> dict[str, str]:
    """Folders of both heads, the shipped ones where none is named."""
    folders = {}
    for kind, folder in named.items():
        folders[kind] = folder or shipped_drafter(models.SHIPPED_HEADS[kind])
        held = read_head_config(Path(folders[kind])).method
        if held != kind:
            raise ValueError(f"--{kind}: {folders[kind]} holds a {held} head")
    return folders


def engines_of(
    sizes: Sizes,
    entries: Sequence[Entry],
    heads: Mapping[str, str],
    eager: bool,
    rounds: int,
) -> list[Engine]:
    """Make an engine for each side of these entries, the same whatever they are."""
    engines = []
    for name in SIDES:
        cells = list({e.key: e.cell for e in entries if e.side == name}.values())
        if cells:
            side = side_of(name, sizes.entries(), heads, eager)
            engines.append(Engine(side, cells, rounds))
    return engines


def scoring(
    plan: Plan, entries: Sequence[Entry], finished: Sequence[StoredCell]
) -> Plan:
    """Plan what scores the answers of the tables."""
    scored = {entry.key for entry in entries if entry.part in TABLES}
    cells, _ = split_scores(plan, finished)
    chosen = [c for c in cells if (c.side.name, c.result.cell.name) in scored]
    return rescoring_plan(plan, chosen)


def evidence(
    plan: Plan,
    entries: Sequence[Entry],
    heads: Mapping[str, str],
    finished: Sequence[StoredCell],
) -> Content:
    """Make what results.json holds."""
    cells, scores = split_scores(plan, finished)
    return {
        # of the heads' own weights, by kind
        "parameters": {kind: models.num_parameters(f) for kind, f in heads.items()},
        **Evidence(cells, scores).rows(entries),
        "scores": scores,
        "runs": without_engines(cells),
    }
