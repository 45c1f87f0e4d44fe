"""Markdown of the workload table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.markdown import table
from benchmarks.report import listing, number
from vllm_treespec.tools.rows import WORTH_IT, Row
from vllm_treespec.tools.sides import PLAIN

ALL_CELLS = (
    "workload",
    "batch",
    "T",
    "side",
    "tokens/s (min–max)",
    "speed-up",
    "acceptance length",
    "nodes",
    "tokens per answer",
    "rounds",
)
NOTES = (
    "Tokens/s: emitted tokens over the wall time from the first request to the last "
    "token; median, lowest and highest of the rounds. Speed-up: against the fastest "
    "plain side of the same cell. All prompts are read once before the cells and stay "
    "in the prefix cache, so a cell measures decoding. The prompts of a workload "
    "repeat between its cells, therefore suffix trees are made from the request's own "
    "prompt and output only (`max_cached_tokens` 0). Batch 1 answers its prompts one "
    "by one, a larger batch as many prompts as it has requests, all at once. Answers "
    "end at the end-of-turn token or at the limit; above temperature 0 every side's "
    "answers differ. Trees are the same in every step (`schedule` fixed) unless the "
    "name says adaptive. Acceptance length: mean emitted tokens per target step of a "
    "request that drafted, bonus included. Stock `ngram` runs at temperature 0 only: "
    "above it, its CPU sampling is wrong in vLLM 0.32 and 0.33."
)


def markdown(
    rows: Sequence[Row], failed: Mapping[str, str], provenance: Mapping[str, Any]
) -> str:
    """Write what to use, one table of speed-ups per temperature, and all cells."""
    smallest = min((row.cell.batch_size for row in rows), default=1)
    parts = ["# Workloads", f"## What to use at batch size {smallest}"]
    parts.append(advice([row for row in rows if row.cell.batch_size == smallest]))
    for temperature in sorted({row.cell.temperature for row in rows}):
        here = [row for row in rows if row.cell.temperature == temperature]
        parts += [f"## Speed-up at temperature {temperature:g}", speedup_table(here)]
    if failed:
        lines = [f"- {name}: {reason}" for name, reason in failed.items()]
        parts += ["## Failed", "\n".join(lines)]
    parts += ["## All cells", table(ALL_CELLS, [cells_row(row) for row in rows])]
    parts += ["## Reading it", NOTES, "## Provenance", listing(provenance)]
    return "\n\n".join(parts) + "\n"


def speedup_table(rows: Sequence[Row]) -> str:
    """Write speed-ups, sides by workload and batch size; plain's tokens/s come last."""
    columns = list(
        dict.fromkeys((row.cell.workload, row.cell.batch_size) for row in rows)
    )
    found = {(row.side, row.cell.workload, row.cell.batch_size): row for row in rows}
    sides = dict.fromkeys(row.side for row in rows)
    lines = []
    for side in sides:
        cells = [found.get((side, *column)) for column in columns]
        speedups = [None if cell is None else cell.speedup for cell in cells]
        lines.append([side, *(number(speedup, "{:.2f}×") for speedup in speedups)])
    fastest = [
        max(
            (
                row.tokens_per_s
                for row in rows
                if row.family == PLAIN
                and (row.cell.workload, row.cell.batch_size) == column
            ),
            default=None,
        )
        for column in columns
    ]
    lines.append(["fastest plain, tokens/s", *(number(v, "{:.1f}") for v in fastest)])
    return table(["side", *(f"{name} {size}" for name, size in columns)], lines)


def advice(rows: Sequence[Row]) -> str:
    """Say per workload which side is best at each temperature."""
    if not rows:
        return "No side is finished."
    lines = []
    for workload in dict.fromkeys(row.cell.workload for row in rows):
        said = [
            f"{best([r for r in rows if (r.cell.workload, r.cell.temperature) == key])}"
            f" at T = {key[1]:g}"
            for key in sorted({(workload, row.cell.temperature) for row in rows})
        ]
        lines.append(f"- {workload}: {'; '.join(said)}")
    return "\n".join(lines)


def best(rows: Sequence[Row]) -> str:
    """Name the fastest side of a cell and its speed-up, or plain."""
    others = [row for row in rows if row.family != PLAIN and row.speedup is not None]
    if not others:
        return "no plain side and another to compare"
    top = max(others, key=lambda row: row.speedup or 0.0)
    named = f"{top.side} {top.speedup:.2f}×"
    if top.speedup is not None and top.speedup >= WORTH_IT:
        return named
    return f"plain vLLM (the best other is {named})"


def cells_row(row: Row) -> list[str]:
    """Write the columns of one side in one cell."""
    answers = row.rounds * (row.cell.num_prompts or 1)
    return [
        row.cell.workload,
        str(row.cell.batch_size),
        f"{row.cell.temperature:g}",
        row.side,
        f"{row.tokens_per_s:.1f} ({row.tokens_per_s_min:.1f}–"
        f"{row.tokens_per_s_max:.1f})",
        number(row.speedup, "{:.2f}×"),
        number(row.acceptance_length, "{:.2f}"),
        number(row.mean_nodes, "{:.1f}"),
        f"{row.num_tokens / answers:.0f}",
        str(row.rounds),
    ]
