"""The evidence of the ReDrafter paper (arXiv 2403.09919), on vLLM."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.harness import models, options
from benchmarks.harness import plan as plans
from benchmarks.harness.provenance import provenance
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
from vllm_treespec.tools.prompts import SHIPPED

Only = Annotated[str, typer.Option(help=f"Some of {','.join(PARTS)}.")]
Tree = Annotated[str, typer.Option(help="Beam width x length x draft tokens.")]


def redrafter(
    only: Only = "table1,table2,figure5,figure6",
    prompts: options.PromptsFile = SHIPPED,
    num_prompts: options.NumPrompts = 8,
    max_tokens: options.MaxTokens = 64,
    tree: Tree = "4x4x15",
    rounds: options.Rounds = 1,
    redrafter: options.Head = "",
    medusa: options.Head = "",
    target: options.Target = "",
    eager: options.Eager = False,
    out: options.Out = Path("runs/redrafter"),
    fresh: options.Fresh = False,
    dry_run: options.DryRun = False,
) -> None:
    """Redo tables 1 and 2 and figures 5 and 6 of the ReDrafter paper."""
    with options.one_line_errors("redrafter"):
        chosen = options.words(only, "--only", PARTS)
        asked, source = models.take_prompts(prompts, num_prompts)
        sizes = Sizes(beams_of(tree), max_tokens, len(asked))
        entries = sizes.entries(chosen)
        heads = heads_of({"redrafter": redrafter, "medusa": medusa})
        named = models.Models(target or str(ensure_target()), heads=heads)
        engines = engines_of(sizes, entries, heads, eager, rounds)
        # every cell says how long its answers are
        job = plans.base_job(named.target, asked, max_tokens=2)
        deciding = {**named.named(), "eager": eager}
        plan = plans.make_plan(job, engines, out, deciding, fresh)
    origin = provenance("redrafter", models=named.named(), prompts=source)
    origin["engines"] = "eager" if eager else "compiled"
    contents = partial(evidence, plan, entries, heads)
    then = partial(scoring, plan, entries)
    plans.run_plan(plan, origin, contents, render, dry_run, then=then)


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
) -> list[plans.Engine]:
    """Make an engine for each side of these entries, the same whatever they are."""
    engines = []
    for name in SIDES:
        cells = list({e.key: e.cell for e in entries if e.side == name}.values())
        if cells:
            side = side_of(name, sizes.entries(), heads, eager)
            engines.append(plans.Engine(side, cells, rounds))
    return engines


def scoring(
    plan: plans.Plan, entries: Sequence[Entry], finished: Sequence[plans.StoredCell]
) -> plans.Plan:
    """Plan what scores the answers of the tables."""
    scored = {entry.key for entry in entries if entry.part in TABLES}
    cells, _ = split_scores(plan, finished)
    chosen = [c for c in cells if (c.side.name, c.result.cell.name) in scored]
    return rescoring_plan(plan, chosen)


def evidence(
    plan: plans.Plan,
    entries: Sequence[Entry],
    heads: Mapping[str, str],
    finished: Sequence[plans.StoredCell],
) -> Content:
    """Make what results.json holds."""
    cells, scores = split_scores(plan, finished)
    without = {"side": {"engine"}}
    return {
        # of the heads' own weights, by kind
        "parameters": {kind: models.num_parameters(f) for kind, f in heads.items()},
        **Evidence(cells, scores).rows(entries),
        "scores": scores,
        "runs": [c.model_dump(mode="json", exclude=without) for c in cells],
    }
