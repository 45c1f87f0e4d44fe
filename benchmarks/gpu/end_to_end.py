"""End to end on a card: are answers the same, and how fast are trees at best?

docs/dev/gpu.md says what is measured and how.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.gpu import card, step
from benchmarks.gpu.step import Row, Work
from benchmarks.harness import models, options, plan, report
from vllm_treespec.config import parse_spec_config
from vllm_treespec.engine.adapters import GPU_V2
from vllm_treespec.engine.refusals import GPU_ATTENTION
from vllm_treespec.plugin import stock_arguments
from vllm_treespec.tools.prompts import SHIPPED
from vllm_treespec.tools.sides import PLAIN, Cell, Side, seeded, with_model
from vllm_treespec.tools.store import read_stored

PARTS = ("lossless", "speed")
METHODS: dict[str, dict[str, Any]] = {
    "sd": {"depth": 4},
    "rsd_c": {"branching_factors": [3, 2, 1]},
    "rsd_s": {"beam_width": 4, "depth": 4},
    "spectr": {"num_paths": 3, "depth": 3},
    "suffix_tree": {"num_drafts": 8, "depth": 4},
    "redrafter": {"beam_width": 4, "length": 4, "num_drafts": 15},
    "medusa_tree": {"num_drafts": 15},
    "eagle_tree": {"num_drafts": 15},
    "lyanna": {"num_drafts": 15, "resample": "merge"},
    "hybrid": {"num_drafts": 15, "depth": 6},
}
EVERY_METHOD = ",".join(METHODS)
# Triton multiplies float32 matrices in TF32 unless it is told otherwise; torch and
# vLLM do not.
IEEE = {"TRITON_F32_DEFAULT": "ieee"}
Only = Annotated[str, typer.Option(help="Some of lossless,speed.")]
OfLossless = Annotated[str, typer.Option(help="Of lossless, comma-separated.")]
V2 = Annotated[
    bool, typer.Option("--v2", help="Lossless on vLLM's V2 runner, in another folder.")
]
Plain = Annotated[
    bool, typer.Option(help="Plain answers too, or have those in --out already.")
]


def gpu_end_to_end(
    only: Only = "lossless,speed",
    methods: OfLossless = EVERY_METHOD,
    dtypes: OfLossless = "float32,bfloat16",
    plain: Plain = True,
    prompts: options.PromptsFile = SHIPPED,
    num_prompts: options.NumPrompts = 8,
    target: options.Target = "",
    draft: options.Draft = "",
    head: options.Heads = None,
    v2: V2 = False,
    shapes: card.Shapes = "8b",
    nodes: card.Numbers = "32",
    batches: card.Numbers = "1,8,32",
    rates: card.Rates = "0.6,0.8",
    context: card.Context = 512,
    max_tokens: options.MaxTokens = 256,
    extra: card.Extra = "{}",
    commit: card.Commit = "",
    out: options.Out = Path("runs/gpu-end-to-end"),
    fresh: options.Fresh = False,
    smoke: card.Smoke = False,
) -> None:
    """Compare answers and speed with plain vLLM, on a card."""
    with (
        options.one_line_errors("gpu-end-to-end"),
        card.results_folder(out, smoke) as folder,
    ):
        sides, sizes = "", [1, 8]
        if smoke:
            nodes, shapes, dtypes = "8", "tiny", "float32"
            methods = "rsd_s,suffix_tree"
            sides, sizes, num_prompts = f"{step.PLAIN_SYNC},ours-8", [1, 2], 2
            eager = {"enforce_eager": True}
            work = Work("answers", [2], [0.8], 20, 12, 0.0, eager, "float32", "cpu")
        else:
            card.require_card()
            speed_sizes = options.numbers(batches, "--batches", int, 1)
            accepted = options.numbers(rates, "--rates", float, 0)
            more = options.json_object(extra, "--extra")
            work = Work("answers", speed_sizes, accepted, context, max_tokens, 0, more)
        plans, parts = [], options.words(only, "--only", PARTS)
        if "lossless" in parts:
            names = options.words(methods, "--methods", list(METHODS))
            kinds = list(models.SHIPPED_HEADS)
            chosen = models.find_models(target, draft, head or [], kinds)
            texts, _ = models.take_prompts(prompts, num_prompts)
            kind = options.words(dtypes)
            every = [
                side
                for side in lossless_sides(chosen, names, kind, work, v2)
                if plain or side.family != PLAIN
            ]
            engines = [plan.Engine(side, lossless_cells(side, sizes)) for side in every]
            job = plan.base_job(chosen.target, texts, work.count)
            deciding = [card.card_and_versions(), chosen.named(), work.extra]
            deciding += [{"runner": "V2"}] if v2 else []
            where = folder / "lossless"
            plans.append(plan.make_plan(job, engines, where, deciding, fresh))
        if "speed" in parts:
            chosen_sides, where = step.named_sides(nodes, sides), folder / "speed"
            made = step.random_plan(shapes, chosen_sides, work, where, fresh)
            plans.append(made)
        run_plans(plans, folder, card.origin("gpu-end-to-end", commit))
        answers = report.read_json(folder)["answers"]
        if smoke and any(row["differences"] for row in answers):
            raise ValueError("answers differ")


def lossless_sides(
    folders: models.Models,
    methods: Sequence[str],
    dtypes: Sequence[str],
    work: Work,
    v2: bool = False,
) -> list[Side]:
    """Make plain vLLM and our methods in each dtype; on a card with one attention."""
    arguments: dict[str, dict[str, Any]] = {PLAIN: {"async_scheduling": v2}}
    runner, adapter = (step.V2_RUNNER, GPU_V2) if v2 else (step.V1_RUNNER, None)
    for name in methods:
        spec = {"method": name, "schedule": "fixed", **METHODS[name]}
        whole = with_model(spec, folders.draft, folders.heads)
        spec_config = parse_spec_config(whole)
        arguments[name] = stock_arguments(spec_config, None, work.device, adapter)
    attention = {"attention_backend": GPU_ATTENTION} if work.device == "cuda" else {}
    return [
        Side(
            name=f"{dtype}-{name}",
            family=name,
            engine={"dtype": dtype, **work.extra, **attention, **own},
            environment=runner | (IEEE if dtype == "float32" else {}),
        )
        for dtype in dtypes
        for name, own in arguments.items()
    ]


def lossless_cells(side: Side, sizes: Sequence[int]) -> list[Cell]:
    """Greedy answers; sampled ones with and without drafts, unless drafts are drawn."""
    greedy = [Cell(batch_size=size, temperature=0.0) for size in sizes]
    if side.family == PLAIN:
        return greedy
    spec = parse_spec_config(side.engine["additional_config"]["treespec"])
    if not spec.rule.follows_noise:
        return greedy
    sampled = [
        Cell(
            batch_size=size,
            temperature=1.0,
            params=seeded(drafts),
            options={"drafts": drafts},
        )
        for size in sizes
        for drafts in (True, False)
    ]
    return greedy + sampled


def run_plans(plans: Sequence[plan.Plan], out: Path, origin: report.Content) -> None:
    """Run both parts' plans in turn, with one results.json; exits 1 on a failure."""
    failed: plan.Failures = {}

    def write(new: plan.Failures) -> None:
        failures = failed | new
        # each part's plan has checked its own; the other may be of an earlier run
        answers, speeds = (
            read_stored(
                sorted((out / part / "cells").glob("*/*.json")),
                plan.StoredCell,
                lambda stored: stored.settings,
            )
            for part in PARTS
        )
        content = {
            **report.header(origin, failures, [*answers, *speeds]),
            "answers": comparisons(answers),
            "cells": step.rows_of(speeds, "tokens_per_s"),
        }
        report.write_json(out, content)
        render(content, out)

    for made in plans:
        failed |= plan.execute(replace(made, commit=origin["commit"]), write)
    write({})
    options.console.print(f"wrote results.json, results.md and plots to {out}")
    if failed:
        raise typer.Exit(1)


def comparisons(cells: Sequence[plan.StoredCell]) -> list[Row]:
    """Each side's answers beside answers without drafts of the same batch size.

    Greedy ones beside those of plain vLLM in the same dtype, sampled ones beside those
    of the same engine. Plain answers of other batch sizes are compared with those of
    the first: what differs there is rounding.
    """

    def place(cell: plan.StoredCell) -> tuple[float, str, int]:
        asked = cell.result.cell
        whose = cell.side.name if asked.temperature else cell.side.engine["dtype"]
        return asked.temperature, whose, asked.batch_size

    truths = {place(cell): cell for cell in cells if not drafted(cell)}
    rows = []
    for cell in sorted(cells, key=lambda cell: (cell.side.name, place(cell))):
        true_place = place(cell)
        if not drafted(cell):
            true_place = min(other for other in truths if other[:2] == true_place[:2])
        truth = truths.get(true_place)
        if truth is not None and truth is not cell:
            rows.append(compare(truth, cell))
    return rows


def drafted(cell: plan.StoredCell) -> bool:
    """Tell answers with drafts from those without."""
    default = cell.side.family != PLAIN
    return bool(cell.result.cell.options.get("drafts", default))


def compare(truth: plan.StoredCell, cell: plan.StoredCell) -> Row:
    """Compare answers token by token."""
    pairs = list(zip(truth.result.token_ids, cell.result.token_ids, strict=True))
    differences = [
        (prompt, first_difference(want, have))
        for prompt, (want, have) in enumerate(pairs)
        if want != have
    ]
    accepted = cell.result.acceptance
    return {
        "side": cell.side.family if drafted(cell) else PLAIN,
        "temperature": cell.result.cell.temperature,
        "dtype": cell.side.engine["dtype"],
        "batch": cell.result.cell.batch_size,
        "answers": len(pairs),
        "identical": len(pairs) - len(differences),
        # of the plain answers
        "num_tokens": sum(len(want) for want, _ in pairs),
        # of each answer that differs: prompt and place of the first other token
        "differences": differences,
        "acceptance_length": accepted.length if accepted and accepted.trees else None,
    }


def first_difference(want: Sequence[int], have: Sequence[int]) -> int:
    """First place at which two sequences differ, or the end of the shorter."""
    pairs = enumerate(zip_longest(want, have))
    return next(place for place, (one, other) in pairs if one != other)


def shown_differences(row: Row) -> str:
    """Write where the first answers begin to differ."""
    shown = [f"{prompt}:{at}" for prompt, at in row["differences"]]
    return " ".join(shown[:4] + ["…"] * (len(shown) > 4)) or "none"


COLUMNS: report.Columns = {
    "side": lambda row: "plain, other batch" if row["side"] == PLAIN else row["side"],
    "T": "{temperature:g}",
    "dtype": "{dtype}",
    "batch": "{batch}",
    "identical": lambda row: f"{row['identical']} of {row['answers']}",
    "tokens": "{num_tokens}",
    "tokens/step": "{acceptance_length:.2f}",
    "first difference (prompt:token)": shown_differences,
}


def render(content: report.Content, out: Path) -> None:
    """Write the tables of both parts, what vLLM chose, and the plot."""
    answers, rows, parts = content["answers"], content["cells"], []
    if answers:
        parts = ["## Are answers the same?", report.table_of(answers, COLUMNS)]
    if rows:
        parts += ["## Speed at fixed acceptance", *step.tables(rows)]
    report.write_markdown(out, "End to end", parts, content)
    step.draw(rows, "tokens/s", {"tokens_per_s": "all tokens"}, out)
