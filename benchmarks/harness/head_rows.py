"""Rows of a table of heads and their trees, from finished cells."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from benchmarks.compare import depths
from benchmarks.harness import report
from benchmarks.harness.plan import StoredCell
from benchmarks.harness.report import number
from benchmarks.rsd.metrics import standard_error
from vllm_treespec.tools.rows import Row, summarise, with_speedups
from vllm_treespec.tools.sides import Acceptance, Cell, CellResult, Side

# Measures a cell, and what the head does in the stage "draft".
PROFILED = "benchmarks.harness.head_parts:profiled"
# A side's name, and a cell's.
Key = tuple[str, str]


class Entry(NamedTuple):
    """What a side measures in a cell: a row of the table."""

    kind: str
    side: Side
    cell: Cell

    @property
    def drafts(self) -> int:
        """Draft tokens of the tree at most."""
        tree = self.cell.tree
        if tree is None:
            return self.side.budget
        return int(tree["num_drafts"]) + int(tree.get("resample_drafts", 0))

    @property
    def label(self) -> str:
        """Names the row, the same in all batches and at all temperatures."""
        return f"{self.kind}-{self.drafts}" if self.cell.tree else self.kind

    @property
    def key(self) -> Key:
        """What tells its measurement from others."""
        return self.side.name, self.cell.name


class HeadRow(Row):
    """A side with one tree in a cell, all rounds."""

    kind: str
    # standard error of acceptance_length over steps
    error: float = 0.0
    # draft nodes a tree that an earlier step left over, scored and accepted
    leftover_nodes: float | None = None
    leftover_accepted: float | None = None


def by_key(finished: Sequence[StoredCell]) -> dict[Key, list[StoredCell]]:
    """The rounds of every measurement, ascending."""
    held: dict[Key, list[StoredCell]] = {}
    for stored in sorted(finished, key=lambda stored: stored.round):
        key = (stored.side.name, stored.result.cell.name)
        held.setdefault(key, []).append(stored)
    return held


def rows_of(entries: Sequence[Entry], finished: Sequence[StoredCell]) -> list[HeadRow]:
    """Make the rows of finished entries; speed-ups are against the fastest plain."""
    held = by_key(finished)
    rows = [
        row_of(entry, [stored.result for stored in held[entry.key]])
        for entry in entries
        if entry.key in held
    ]
    return [HeadRow.model_validate(row.model_dump()) for row in with_speedups(rows)]


def row_of(entry: Entry, results: Sequence[CellResult]) -> HeadRow:
    """Pool the rounds of an entry, as a cell that all sides share."""
    shape = entry.cell.batch_size, entry.cell.temperature
    cell = Cell(batch_size=shape[0], temperature=shape[1])
    side = entry.side.model_copy(update={"name": entry.label, "budget": entry.drafts})
    shared = [result.model_copy(update={"cell": cell}) for result in results]
    total = Acceptance.total(r.acceptance for r in results if r.acceptance)
    error = standard_error(total) if total.trees else 0.0
    row = summarise(side, shared).model_dump()
    return HeadRow(**row, kind=entry.kind, error=error)


def tokens_per_step(row: HeadRow) -> str:
    """Write the acceptance length with its error; of plain decoding nothing."""
    if row.acceptance_length is None:
        return "–"
    return f"{row.acceptance_length:.2f} ± {row.error:.2f}"


COLUMNS: report.Columns[HeadRow] = {
    "side": lambda row: row.side,
    "drafts": lambda row: str(row.budget or "–"),
    "tokens/step": tokens_per_step,
    "tokens/s (min–max)": lambda row: report.spread(
        row.tokens_per_s, row.tokens_per_s_min, row.tokens_per_s_max
    ),
    "speed-up": lambda row: number(row.speedup, "{:.2f}×"),
    "nodes": lambda row: number(row.mean_nodes, "{:.1f}"),
    "accepted at depth 1, 2, …": depths,
    "rounds": lambda row: str(row.rounds),
}
