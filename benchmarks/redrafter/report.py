"""Markdown of the tables, and of the numbers behind the figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel

from benchmarks.markdown import table
from benchmarks.redrafter.parts import LOSSY
from benchmarks.redrafter.rows import Compression, Mean, Row, Stretch
from benchmarks.report import listing, number

NOTES = (
    "Tokens/s: emitted tokens over wall time, prefill included; median and, of several "
    "rounds, lowest–highest. Speed-up: against plain vLLM in the same round, median of "
    "the rounds; plain and all others run compiled unless the provenance says eager. "
    "Tokens/step: mean emitted tokens per target step of a drafting request, bonus "
    "included, ± standard error over steps. Quality: mean log-likelihood per token of "
    "the answers under the target at temperature 1, nats, ± standard error over "
    "prompts. Greedy answers are likelier than sampled ones: it says how far a side is "
    "from its reference, not that higher is better. Greedy, rejection and stochastic "
    "beam are lossless: their quality is that of plain decoding at their temperature, "
    f"up to noise. Typical acceptance (epsilon {LOSSY['epsilon']}, delta "
    f"{LOSSY['delta']}) is not: it draws no token at all, the temperature only says "
    "how plausible a draft has to be."
)
TABLE2_NOTES = (
    "Rejection: deterministic beams and tokens drawn from the target. Stochastic beam: "
    "beams drawn from the head and recursive rejection, beyond the paper. Quality "
    "gain: against greedy plain decoding, ± standard error over prompts."
)
FIGURE5_NOTES = (
    "Tokens per step by where in the answer the step begins, ± standard error over "
    "steps; the last step of an answer, which its end may cut off, is left out."
)
COMPRESSION_NOTES = (
    "Draft tokens that the target verifies per step: without tree attention every beam "
    "is verified whole, with it equal prefixes are verified once."
)
FIGURE6_NOTES = (
    "Greedy. Throughput: tokens/s of all requests; tokens/s per request: throughput / "
    "batch size. Without tree attention, each beam's path has as many rows of its own "
    "as it has tokens: fillers below the leaves stand for the repeated prefixes, so "
    "the target computes what it would for one chain per beam, and accepts the same "
    "tokens. Prompts are repeated where a batch is larger than their number."
)


class Results(BaseModel):
    """All numbers that the tables and figures show."""

    # parameters of the heads' own weights, by kind
    parameters: dict[str, int]
    rows: list[Row]
    stretches: list[Stretch]
    compressions: list[Compression]
    # why sides failed, by name
    failed: dict[str, str]

    def of(self, part: str) -> list[Row]:
        """Rows of a part."""
        return [row for row in self.rows if row.part == part]


def markdown(results: Results, origin: Mapping[str, Any]) -> str:
    """Write what is finished of each part, and where it comes from."""
    parts = ["# ReDrafter's evidence", NOTES]
    if rows := results.of("table1"):
        parts += ["## Table 1: Medusa and ReDrafter", table1(rows, results.parameters)]
    if rows := results.of("table2"):
        parts += ["## Table 2: acceptance by temperature", TABLE2_NOTES, table2(rows)]
    if results.stretches:
        parts += ["## Figure 5a: tokens per step", FIGURE5_NOTES]
        parts += [figure5a(results.stretches), "![](figure5.png)"]
    if results.compressions:
        parts += ["## Figure 5b: compression by tree attention", COMPRESSION_NOTES]
        parts += [figure5b(results.compressions)]
    if rows := results.of("figure6"):
        parts += ["## Figure 6: speed and throughput", FIGURE6_NOTES]
        parts += [figure6(rows), "![](figure6.png)"]
    if results.failed:
        lines = [f"- {name}: {reason}" for name, reason in results.failed.items()]
        parts += ["## Failed", "\n".join(lines)]
    parts += ["## Provenance", listing(origin)]
    return "\n\n".join(parts) + "\n"


def table1(rows: Sequence[Row], parameters: Mapping[str, int]) -> str:
    """Write table 1; speed-ups are against plain decoding at the same temperature."""
    headings = ["side", "head parameters", "T", "tokens/s", "tokens/step", "speed-up"]
    headings += ["quality", "quality − plain greedy's", "rounds"]
    lines = [
        [
            row.label,
            number(head_parameters(row, parameters), "{:.2f} M"),
            f"{row.temperature:g}",
            speeds(row),
            shown(row.tokens_per_step),
            number(row.speedup, "{:.2f}×"),
            shown(row.quality, 3),
            shown(row.quality_gain, 3),
            str(row.rounds),
        ]
        for row in rows
    ]
    return table(headings, lines)


def head_parameters(row: Row, parameters: Mapping[str, int]) -> float | None:
    """Millions of parameters of a row's head."""
    found = parameters.get(row.side.split("-")[0])
    return found and found / 1e6


def table2(rows: Sequence[Row]) -> str:
    """Write table 2."""
    headings = ["acceptance", "T", "tokens/s", "tokens/step", "speed-up at this T"]
    headings += ["over plain greedy", "quality", "quality gain", "rounds"]
    lines = [
        [
            row.label,
            f"{row.temperature:g}",
            speeds(row),
            shown(row.tokens_per_step),
            number(row.speedup, "{:.2f}×"),
            number(row.speedup_over_greedy, "{:.2f}×"),
            shown(row.quality, 3),
            shown(row.quality_gain, 3),
            str(row.rounds),
        ]
        for row in rows
    ]
    return table(headings, lines)


def figure5a(stretches: Sequence[Stretch]) -> str:
    """Write tokens per step: beam widths by stretches of the answers."""
    spans = list(dict.fromkeys((s.first, s.last) for s in stretches))
    cells = {(s.beam_width, s.first): s.tokens_per_step for s in stretches}
    headings = ["beam width", *(f"tokens {first}–{last}" for first, last in spans)]
    widths = dict.fromkeys(s.beam_width for s in stretches)
    lines = [
        [str(width), *(shown(cells.get((width, first))) for first, _ in spans)]
        for width in widths
    ]
    return table(headings, lines)


def figure5b(compressions: Sequence[Compression]) -> str:
    """Write the tokens to verify per beam width."""
    headings = ["beam width × length", "without", "with: mean", "1st percentile"]
    headings += ["99th percentile", "ratio", "trees"]
    lines = [
        [
            f"{c.beam_width} × {c.length}",
            str(c.num_candidates),
            f"{c.mean:.1f}",
            str(c.low),
            str(c.high),
            f"{c.num_candidates / c.mean:.2f}",
            str(c.num_trees),
        ]
        for c in compressions
    ]
    return table(headings, lines)


def figure6(rows: Sequence[Row]) -> str:
    """Write speeds by batch size."""
    headings = ["side", "batch", "tokens/s per request", "throughput, tokens/s"]
    headings += ["speed-up", "tokens/step", "draft tokens per tree", "rounds"]
    lines = [
        [
            row.label,
            str(row.batch_size),
            f"{row.tokens_per_s / row.batch_size:.1f}",
            speeds(row),
            number(row.speedup, "{:.2f}×"),
            shown(row.tokens_per_step),
            number(row.mean_drafts, "{:.1f}"),
            str(row.rounds),
        ]
        for row in rows
    ]
    return table(headings, lines)


def speeds(row: Row) -> str:
    """Write a median with its range, when there is one."""
    median = f"{row.tokens_per_s:.1f}"
    if row.rounds == 1:
        return median
    return f"{median} ({row.tokens_per_s_min:.1f}–{row.tokens_per_s_max:.1f})"


def shown(value: Mean | None, digits: int = 2) -> str:
    """Write a mean with its error."""
    if value is None:
        return "–"
    return f"{value.mean:.{digits}f} ± {value.error:.{digits}f}"
