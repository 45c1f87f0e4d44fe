"""Markdown from rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.markdown import table
from vllm_treespec.core.stats import STAGES
from vllm_treespec.tools.rows import Row
from vllm_treespec.tools.sides import PLAIN, Cell

HEADER = (
    "side",
    "drafts",
    "tokens/s (min–max)",
    "speed-up",
    "TPOT ms",
    "acceptance length",
    "accepted at depth 1, 2, …",
    "nodes",
    *(f"{stage} %" for stage in STAGES),
    "other %",
    "rounds",
)
MAX_DEPTHS = 6


def markdown(
    rows: Sequence[Row], failed: Mapping[str, str], provenance: Mapping[str, Any]
) -> str:
    """Write one table per cell, the failures, and where the numbers come from."""
    parts = ["# Benchmark"]
    for cell in dict.fromkeys(row.cell for row in rows):
        here = [row for row in rows if row.cell == cell]
        parts += [f"## {title(cell)}", table(HEADER, [table_row(row) for row in here])]
        if (winner := best(here)) is not None:
            parts.append(winner)
    if failed:
        lines = [f"- {name}: {reason}" for name, reason in failed.items()]
        parts += ["## Failed", "\n".join(lines)]
    parts += ["## Reading it", NOTES, "## Provenance", listing(provenance)]
    return "\n\n".join(parts) + "\n"


NOTES = (
    "Tokens/s: all emitted tokens over the wall time from the first request to the "
    "last token, prefill included; median, lowest and highest of the rounds. Speed-up: "
    "against the fastest plain side of the same table. TPOT: per request, time from "
    "the first to the last token over the tokens after the first. Acceptance length: "
    "mean emitted tokens per target step of a request that drafted, bonus included. "
    "Accepted at depth d: share of those steps in which at least d draft tokens were "
    "accepted. Nodes: mean per tree, root included. Stages: share of the wall time; "
    "`other` is prefill, the scheduler and what else vLLM does. Prompts are wrapped in "
    "the chat template; generation ends at the end-of-turn token or at the limit. "
    "Stock `ngram` and `draft_model` run at temperature 0 only: above it, their CPU "
    "sampling is wrong in vLLM 0.32 and 0.33."
)


def title(cell: Cell) -> str:
    """Name a cell."""
    return f"Batch {cell.batch_size}, temperature {cell.temperature:g}"


def table_row(row: Row) -> list[str]:
    """Write the columns of one row; what a side does not have is a dash."""
    shares = [row.stage_shares.get(name) for name in (*STAGES, "other")]
    depths = [f"{share:.2f}" for share in row.acceptance_by_depth[:MAX_DEPTHS]]
    if len(row.acceptance_by_depth) > MAX_DEPTHS:
        depths.append("…")
    return [
        row.side,
        str(row.budget) if row.budget else "–",
        f"{row.tokens_per_s:.1f} ({row.tokens_per_s_min:.1f}–"
        f"{row.tokens_per_s_max:.1f})",
        number(row.speedup, "{:.2f}×"),
        number(row.tpot_ms, "{:.1f}"),
        number(row.acceptance_length, "{:.2f}"),
        " ".join(depths) or "–",
        number(row.mean_nodes, "{:.1f}"),
        *(number(share and 100 * share, "{:.0f}") for share in shares),
        str(row.rounds),
    ]


def number(value: float | None, form: str) -> str:
    """Format a number that may be missing."""
    return "–" if value is None else form.format(value)


def best(rows: Sequence[Row]) -> str | None:
    """Say which of ours is fastest, against which plain side."""
    plain = [row for row in rows if row.family == PLAIN]
    ours = [row for row in rows if row.stage_shares]
    if not plain or not ours:
        return None
    base = max(plain, key=lambda row: row.tokens_per_s)
    top = max(ours, key=lambda row: row.tokens_per_s)
    return (
        f"Fastest of ours: {top.side}, {top.tokens_per_s / base.tokens_per_s:.2f}× "
        f"the fastest plain side ({base.side}, {base.tokens_per_s:.1f} tokens/s)."
    )


def listing(values: Mapping[str, Any]) -> str:
    """Write values as one line each."""
    return "\n".join(f"- {key}: {shown(value)}" for key, value in values.items())


def shown(value: Any) -> str:
    """Write nested values on one line."""
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {shown(v)}" for name, v in value.items())
    if isinstance(value, list):
        return " ".join(map(shown, value))
    return str(value)
