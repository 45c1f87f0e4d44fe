"""Rows of tables from finished cells: one side in one cell, all rounds."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from benchmarks.harness.plan import Engine, StoredCell, without_text
from benchmarks.harness.report import Columns, Content
from vllm_treespec.config import METHODS
from vllm_treespec.tools.rows import Row, summarise, with_speedups
from vllm_treespec.tools.sides import PLAIN, Acceptance, Cell, CellResult, Side

FAMILIES = (PLAIN, "ngram", "draft_model", *METHODS)
MAX_DEPTHS = 6
# A side's name, and a cell's.
Key = tuple[str, str]


class Entry(NamedTuple):
    """What a side measures in a cell: a row of a table or a point of a figure."""

    kind: str
    side: Side
    cell: Cell
    # which table or figure, where an experiment has several
    part: str = ""

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
    """A side with one tree in a cell."""

    kind: str
    # standard error of acceptance_length over steps
    error: float = 0.0
    # draft nodes a tree that an earlier step left over, scored and accepted
    leftover_nodes: float | None = None
    leftover_accepted: float | None = None


def engines_of(
    sides: Iterable[Side], cells: Sequence[Cell], rounds: int
) -> list[Engine]:
    """Let every side measure all cells that it can."""
    return [
        Engine(
            side,
            [cell for cell in cells if not (side.greedy_only and cell.temperature)],
            rounds,
        )
        for side in sides
    ]


def engines_of_entries(
    sides: Sequence[Side], entries: Sequence[Entry], rounds: int
) -> list[Engine]:
    """Let every side measure the cells of its entries, each once."""
    cells = {side.name: [e.cell for e in entries if e.side == side] for side in sides}
    return [
        Engine(side, list(dict.fromkeys(cells[side.name])), rounds) for side in sides
    ]


def by_key(finished: Sequence[StoredCell]) -> dict[Key, list[StoredCell]]:
    """The rounds of every measurement, ascending."""
    held: dict[Key, list[StoredCell]] = {}
    for stored in sorted(finished, key=lambda stored: stored.round):
        key = (stored.side.name, stored.result.cell.name)
        held.setdefault(key, []).append(stored)
    return held


def comparison(cells: Sequence[Cell], finished: Sequence[StoredCell]) -> Content:
    """Make a row for each side in each cell, and keep all rounds without their text.

    Rows come by cell, stock sides first, then ours by method and budget.
    """
    order = [cell.name for cell in cells]

    def place(row: Row) -> tuple[Any, ...]:
        family = FAMILIES.index(row.family)
        return order.index(row.cell.name), bool(row.budget), family, row.budget

    rows = [
        summarise(group[0].side, [stored.result for stored in group])
        for (_, cell), group in sorted(by_key(finished).items())
        if cell in order
    ]
    rows = with_speedups(sorted(rows, key=place))
    return {
        "rows": [row.model_dump(mode="json") for row in rows],
        "runs": without_text(finished),
    }


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


def standard_error(acceptance: Acceptance) -> float:
    """Standard error of the acceptance length, steps taken as independent.

    Uses E[a] = sum P(a >= d) and E[a²] = sum (2 d - 1) P(a >= d) over depths d.
    """
    shares = [count / acceptance.trees for count in acceptance.at_least]
    square = sum((2 * d - 1) * share for d, share in enumerate(shares, 1))
    return float((max(square - sum(shares) ** 2, 0.0) / acceptance.trees) ** 0.5)


def depths(row: Row) -> str:
    """Write the shares of trees that were accepted so deep."""
    shares = [f"{share:.2f}" for share in row.acceptance_by_depth]
    more = ["…"] if len(shares) > MAX_DEPTHS else []
    return " ".join(shares[:MAX_DEPTHS] + more) or "–"


def drafts(row: Row) -> str:
    """Write the draft tokens of a tree; plain decoding has none."""
    return str(row.budget or "–")


SPEEDS = "{tokens_per_s:.1f} ({tokens_per_s_min:.1f}–{tokens_per_s_max:.1f})"
# Of plain decoding the acceptance length is None.
COLUMNS: Columns = {
    "side": "{side}",
    "drafts": drafts,
    "tokens/step": "{acceptance_length:.2f} ± {error:.2f}",
    "tokens/s (min–max)": SPEEDS,
    "speed-up": "{speedup:.2f}×",
    "nodes": "{mean_nodes:.1f}",
    "accepted at depth 1, 2, …": depths,
    "rounds": "{rounds}",
}
