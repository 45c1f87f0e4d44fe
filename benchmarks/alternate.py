"""Plain decoding, the schedule's trees and others in turn, inside one engine."""

from __future__ import annotations

import pkgutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from pydantic import BaseModel

from benchmarks.harness import options, plot, report
from benchmarks.harness.alternating import FIXED, PLAIN, SCHEDULE, Alternation, Block
from benchmarks.harness.experiment import Run, experiment
from benchmarks.harness.plan import StoredCell, base_job, without_text
from benchmarks.harness.report import Columns, Content
from benchmarks.harness.rows import engines_of
from benchmarks.workloads import BatchOptions
from vllm_treespec.tools.sides import Cell, choose_sides, tree_sides

MEASURE = "benchmarks.harness.alternating:measure"
RESAMPLES = 2000
# Fewer tell no interval.
FEWEST_BLOCKS = 5
NOTES = (
    "One engine for each method: its variants alternate in random order, so they meet "
    "the same prompts, memory and disturbances. Ratios are to the first variant, with "
    "the interval that holds 95 of 100 of those that resampled cycles make. Plain "
    "steps here are those of an engine with a spec-config: stock vLLM's are up to 1 ms "
    "shorter."
)


@dataclass(frozen=True)
class Options(BatchOptions):
    """Options of ``alternate``."""

    waves: options.Waves = 2
    variants: Annotated[
        str,
        typer.Option(
            help="plain: no trees; schedule: the measured schedule's; fixed: the "
            "largest tree in every step. The first is what the others are compared "
            "with."
        ),
    ] = f"{PLAIN},{SCHEDULE}"
    vary: Annotated[
        str,
        typer.Option(
            help="module:NAME=VALUE,VALUE,...: a number in our code. The last variant "
            "then comes with each of its values, and learns for each apart."
        ),
    ] = ""
    block_tokens: Annotated[
        int,
        typer.Option(
            min=0,
            help="Tokens of a request before the next variant; 0: whole answers, the "
            "same prompts with each variant.",
        ),
    ] = 0

    def alternation(self) -> Alternation:
        """Read what alternates.

        Raises:
            ValueError: when there is no such variant, only one, or no such values.

        """
        known = (PLAIN, SCHEDULE, FIXED)
        number, _, texts = self.vary.partition("=")
        alternation = Alternation(
            variants=options.words(self.variants, "--variants", known),
            block_tokens=self.block_tokens,
            number=number,
            values=options.numbers(texts, "--vary", float) if self.vary else [],
        )
        if not alternation.variants or alternation.num_variants < 2:
            raise ValueError(
                "--variants: name two or more, or one with two values or more in --vary"
            )
        if self.vary:
            check_number(number, self.vary)
        return alternation


class Outcome(BaseModel):
    """What a variant of a side did in a cell."""

    side: str
    cell: Cell
    variant: str
    steps: int
    tokens: int
    drafts: int
    levels: int
    seconds: float
    # tokens per second, over those of the first variant, and the interval of that
    ratio: float
    # None where few blocks tell little
    low: float | None
    high: float | None

    @property
    def tokens_per_s(self) -> float:
        """Speed of its steps."""
        return self.tokens / self.seconds


@experiment
def alternate(asked: Options) -> Run:
    """Alternate plain decoding, the schedule's trees and others inside one engine."""
    models = asked.models()
    measured = [
        {"schedule": "measured", "schedule_cache": False, **spec}
        for spec in options.of_own_text(asked.specs(models))
    ]
    modes = options.EAGER_MODES[asked.engines]
    sides = tree_sides(measured, models.draft, modes, models.heads)
    chosen = choose_sides(sides, options.words(asked.sides))
    alternation = asked.alternation().model_dump(exclude_defaults=True)
    how = {"measure": MEASURE, "options": alternation}
    work, found = asked.find_cells()
    cells = [cell.model_copy(update=how) for cell in found]
    return Run(
        job=base_job(models.target, [], workloads=work, **asked.requests()),
        engines=engines_of(chosen, cells, asked.rounds),
        models=models,
        prompts=asked.asked(work),
        contents=lambda _, finished: contents(cells, finished),
        render=render,
    )


def check_number(number: str, vary: str) -> None:
    """Refuse what is no number of a module, "module:NAME"."""
    module, _, name = number.partition(":")
    if not name:
        raise ValueError(f"--vary: {vary!r} is not module:NAME=VALUE,VALUE,...")
    if not isinstance(vars(pkgutil.resolve_name(module)).get(name), int | float):
        raise ValueError(f"--vary: there is no number {name} in {module}")


def contents(cells: Sequence[Cell], finished: Sequence[StoredCell]) -> Content:
    """Make an outcome of each variant of each side in each cell; keep the blocks."""
    blocks: dict[tuple[str, str], list[Block]] = {}
    for stored in sorted(finished, key=lambda stored: stored.round):
        key = stored.result.cell.name, stored.side.name
        found = stored.result.details["blocks"]
        blocks.setdefault(key, []).extend(map(Block.model_validate, found))
    rows = [
        outcome
        for cell in cells
        for (cell_name, side), own in blocks.items()
        if cell_name == cell.name
        for outcome in outcomes(side, cell, own)
    ]
    return {
        "rows": [row.model_dump(mode="json") for row in rows],
        "runs": without_text(finished),
    }


def outcomes(side: str, cell: Cell, blocks: Sequence[Block]) -> list[Outcome]:
    """Add the blocks of each variant up, and compare them with the first one's.

    Variants whose steps were not timed are left out.
    """
    timed = [block for block in blocks if block.steps]
    names = variants_in_order(cell, timed)
    if not names:
        return []
    base = [block for block in timed if block.variant == names[0]]
    found = []
    for name in names:
        own = [block for block in timed if block.variant == name]
        low, high = interval(own, base)
        found.append(
            Outcome(
                side=side,
                cell=cell,
                variant=name,
                steps=sum(block.steps for block in own),
                tokens=sum(block.tokens for block in own),
                drafts=sum(block.drafts for block in own),
                levels=sum(block.levels for block in own),
                seconds=sum(block.seconds for block in own),
                ratio=speed(own) / speed(base),
                low=low,
                high=high,
            )
        )
    return found


def variants_in_order(cell: Cell, blocks: Sequence[Block]) -> list[str]:
    """The variants that ran, as they were named; values of a number come last."""
    ran = {block.variant for block in blocks}
    named = [name for name in cell.options["variants"] if name in ran]
    return named + sorted(ran - set(named))


def speed(blocks: Sequence[Block]) -> float:
    """Tokens per second of some blocks."""
    return sum(b.tokens for b in blocks) / sum(b.seconds for b in blocks)


def interval(
    own: Sequence[Block], base: Sequence[Block]
) -> tuple[float, float] | tuple[None, None]:
    """Where 95 of 100 ratios of speeds lie, if other cycles had come by chance.

    The blocks of a cycle, one of each variant, stay together: they met the same text,
    or nearly so, and the same machine.
    """
    if own == base:
        return 1.0, 1.0
    count = min(len(own), len(base))
    if count < FEWEST_BLOCKS:
        return None, None
    drawn = np.random.default_rng(0).integers(count, size=(RESAMPLES, count))
    ratios = speeds(own, drawn) / speeds(base, drawn)
    low, high = np.quantile(ratios, [0.025, 0.975])
    return float(low), float(high)


def speeds(blocks: Sequence[Block], drawn: np.ndarray) -> np.ndarray:
    """Tokens per second of each row of drawn blocks, int64 [num_rows, num_drawn]."""
    tokens = np.array([block.tokens for block in blocks])
    seconds = np.array([block.seconds for block in blocks])
    found: np.ndarray = tokens[drawn].sum(axis=1) / seconds[drawn].sum(axis=1)
    return found


def with_interval(row: Outcome) -> str:
    """Write a ratio and where it likely lies."""
    between = "" if row.low is None else f" ({row.low:.2f}–{row.high:.2f})"
    return f"{row.ratio:.2f}×{between}"


COLUMNS: Columns = {
    "workload": "{cell.workload}",
    "batch": "{cell.batch_size}",
    "T": "{cell.temperature:g}",
    "side": "{side}",
    "variant": "{variant}",
    "tokens/s": "{tokens_per_s:.1f}",
    "ratio (95 %)": with_interval,
    "steps": "{steps}",
    "ms a step": lambda row: f"{1000 * row.seconds / row.steps:.1f}",
    "tokens a step": lambda row: f"{row.tokens / row.steps:.2f}",
    "drafts a step": lambda row: f"{row.drafts / row.steps:.1f}",
    "levels a step": lambda row: f"{row.levels / row.steps:.1f}",
}


def render(content: Content, out: Path) -> None:
    """Write ratios by work and batch size, all cells, and the plot."""
    rows = [Outcome.model_validate(row) for row in content["rows"]]
    parts = ["## Ratios, T = lowest / … / highest", ratio_table(rows)]
    parts += ["## All cells", report.table_of(rows, COLUMNS), "## Reading it", NOTES]
    report.write_markdown(out, "Alternating steps", parts, content)
    plot.line_panels(
        [
            {
                "batch size": row.cell.batch_size,
                "ratio": row.ratio,
                "drafts": f"{row.side}, {row.variant}",
                "temperature": row.cell.temperature,
                "workload": row.cell.workload,
            }
            for row in rows
        ],
        out / "results.png",
        x="batch size",
        y="ratio",
        hue="drafts",
        style="temperature",
        col="workload",
        log_x=True,
        level=1,
    )


def ratio_table(rows: Sequence[Outcome]) -> str:
    """Write a line for each variant of a side, a column for each work and size."""
    columns = dict.fromkeys((r.cell.workload, r.cell.batch_size) for r in rows)
    found: dict[tuple[tuple[str, ...], tuple[str, int]], list[str]] = {}
    for row in sorted(rows, key=lambda row: row.cell.temperature):
        cell = row.cell.workload, row.cell.batch_size
        line = row.side, row.variant
        found.setdefault((line, cell), []).append(f"{row.ratio:.2f}")
    return report.grid(
        ["side", "variant"],
        {column: "{} {}".format(*column) for column in columns},
        {key: " / ".join(ratios) for key, ratios in found.items()},
    )
