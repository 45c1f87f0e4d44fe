"""Rows of the table, and the plain step's cost, from finished cells."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from benchmarks.eagle.parts import PLAIN_STEP, Entry
from benchmarks.harness.plan import StoredCell
from benchmarks.rsd.metrics import standard_error
from vllm_treespec.core.stats import KEEP_FEATURES
from vllm_treespec.tools.rows import Row, summarise, with_speedups
from vllm_treespec.tools.sides import Acceptance, Cell, CellResult


class HeadRow(Row):
    """A side with one tree at a temperature, all rounds."""

    kind: str
    # standard error of acceptance_length over steps
    error: float = 0.0


def rows_of(entries: Sequence[Entry], finished: Sequence[StoredCell]) -> list[HeadRow]:
    """Make the rows of finished entries; speed-ups are against the fastest plain."""
    results: dict[tuple[str, str], list[CellResult]] = {}
    for stored in finished:
        key = (stored.side.name, stored.result.cell.name)
        results.setdefault(key, []).append(stored.result)
    keyed = [(entry, (entry.side.name, entry.cell.name)) for entry in entries]
    rows = [row_of(entry, results[key]) for entry, key in keyed if key in results]
    return [HeadRow.model_validate(row.model_dump()) for row in with_speedups(rows)]


def row_of(entry: Entry, results: Sequence[CellResult]) -> HeadRow:
    """Pool the rounds of an entry, as a cell that all sides share."""
    cell = Cell(batch_size=1, temperature=entry.cell.temperature)
    side = entry.side.model_copy(update={"name": entry.label, "budget": entry.drafts})
    shared = [result.model_copy(update={"cell": cell}) for result in results]
    total = Acceptance.total(r.acceptance for r in results if r.acceptance)
    error = standard_error(total) if total.trees else 0.0
    row = summarise(side, shared).model_dump()
    return HeadRow(**row, kind=entry.kind, error=error)


def plain_steps_of(finished: Sequence[StoredCell]) -> list[dict[str, Any]]:
    """Times of a step without trees beside plain vLLM's: a row for each round.

    Times are in milliseconds, medians over the answers; ``ratio`` is the median of
    their ratios, ``own_ms`` what our stages count, ``features_ms`` a part of it.
    """
    rows = []
    for result in [s.result for s in finished if s.side.name == PLAIN_STEP]:
        both = result.details["ours_ms"], result.details["plain_ms"]
        pairs = [(a, b) for a, b in zip(*both, strict=True) if a and b]
        stages, steps = result.stage_seconds, result.steps or 1
        row = {
            "answers": len(pairs),
            "ours_ms": statistics.median(ours for ours, _ in pairs),
            "plain_ms": statistics.median(plain for _, plain in pairs),
            "ratio": statistics.median(ours / plain for ours, plain in pairs),
            "own_ms": 1000 * (stages["draft"] + stages["tree_build"]) / steps,
            "features_ms": 1000 * stages[KEEP_FEATURES] / steps,
        }
        rows.append(row)
    return rows
