"""What each table and figure of the ReDrafter paper needs to be run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from vllm_treespec.tools.sides import PLAIN, Cell, Side, plain_side, side_of_trees

PARTS = ("table1", "table2", "figure5", "figure6")
# arXiv 2401.10774, section 3.3.2: delta is the square root of epsilon.
LOSSY = {"epsilon": 0.09, "delta": 0.3}
BEAMS = {"method": "redrafter", "tree": "beams"}
# An engine each; its spec-config without the head and the trees.
SIDES: dict[str, dict[str, Any]] = {
    PLAIN: {},
    "medusa": {"method": "medusa_tree"},
    "medusa-typical": {"method": "medusa_tree", "lossy_typical_acceptance": LOSSY},
    "redrafter": BEAMS,
    "redrafter-typical": {**BEAMS, "lossy_typical_acceptance": LOSSY},
    "redrafter-stochastic": {"method": "redrafter", "beam_search": "stochastic"},
}
TABLE2_TEMPERATURES = (0.1, 0.3, 0.5, 0.7, 0.9)
TABLE2_SIDES = {
    "plain sampling": PLAIN,
    "rejection": "redrafter",
    "typical (lossy)": "redrafter-typical",
    "stochastic beam": "redrafter-stochastic",
}
# Labels, sides and temperatures. The answers are scored under the target.
TABLES = {
    "table1": [
        ("plain, greedy", PLAIN, 0.0),
        ("Medusa, greedy", "medusa", 0.0),
        ("ReDrafter, greedy", "redrafter", 0.0),
        ("plain, T = 0.7", PLAIN, 0.7),
        ("Medusa, typical (lossy)", "medusa-typical", 0.7),
        ("ReDrafter, typical (lossy)", "redrafter-typical", 0.7),
        ("plain, T = 1", PLAIN, 1.0),
    ],
    "table2": [
        ("plain greedy", PLAIN, 0.0),
        *((*side, t) for side in TABLE2_SIDES.items() for t in TABLE2_TEMPERATURES),
    ],
}
FIGURE5_WIDTHS = (1, 2, 4, 8, 12)
FIGURE5_LENGTH = 5
FIGURE6_WIDTHS = (2, 8)
FIGURE6_BATCH_SIZES = (1, 2, 4, 8, 16)
TRACED = "benchmarks.redrafter.engine:traced"
CHAINS = "benchmarks.redrafter.engine:chains"
# How labels of beams without tree attention end.
WITHOUT = ", no tree attention"


class Beams(NamedTuple):
    """The tree of both tables; Medusa's has as many draft tokens."""

    beam_width: int
    length: int
    num_drafts: int


class Entry(NamedTuple):
    """A row of a table or a point of a figure: what a side measures."""

    part: str
    label: str
    side: str
    cell: Cell

    @property
    def key(self) -> tuple[str, str]:
        """What tells its measurement from others."""
        return self.side, self.cell.name


@dataclass(frozen=True)
class Sizes:
    """What the user chooses; a larger batch repeats prompts."""

    beams: Beams
    max_tokens: int
    num_prompts: int

    def entries(self, parts: Sequence[str] = PARTS) -> list[Entry]:
        """All rows and points of these parts."""
        entries = [*self.tables(), *self.figure5(), *self.figure6()]
        return [entry for part in parts for entry in entries if entry.part == part]

    def cell(self, tree: dict[str, int] | None = None, **more: Any) -> Cell:
        """A greedy cell of one request at a time, or as ``more`` says."""
        usual = {"batch_size": 1, "temperature": 0.0, "max_tokens": self.max_tokens}
        return Cell(tree=tree, **{**usual, **more})

    def tables(self) -> Iterator[Entry]:
        """Rows of the tables; a stochastic beam keeps all its tokens."""
        tree = self.beams._asdict()
        trees = {"medusa": ["num_drafts"], "redrafter": list(tree), PLAIN: []}
        trees["redrafter-stochastic"] = ["beam_width", "length"]
        for part, rows in TABLES.items():
            for label, side, temperature in rows:
                keys = trees.get(side) or trees[head_of(side)]
                shape = {key: tree[key] for key in keys} or None
                yield Entry(
                    part, label, side, self.cell(shape, temperature=temperature)
                )

    def figure5(self) -> Iterator[Entry]:
        """Beam widths, with answers of twice the length."""
        for width in FIGURE5_WIDTHS:
            tree, length = all_tokens(width, FIGURE5_LENGTH), 2 * self.max_tokens
            cell = self.cell(tree, max_tokens=length, measure=TRACED)
            yield Entry("figure5", f"beam width {width}", "redrafter", cell)

    def figure6(self) -> Iterator[Entry]:
        """Batch sizes, with and without tree attention."""
        for size in FIGURE6_BATCH_SIZES:
            repeated = size if size > self.num_prompts else None
            batch: dict[str, Any] = {"batch_size": size, "num_prompts": repeated}
            yield Entry("figure6", "plain", PLAIN, self.cell(**batch))
            for width in FIGURE6_WIDTHS:
                tree = all_tokens(width, self.beams.length)
                for end, measure in (("", ""), (WITHOUT, CHAINS)):
                    cell = self.cell(tree, **batch, measure=measure)
                    label = f"ReDrafter, {width} beams{end}"
                    yield Entry("figure6", label, "redrafter", cell)


def all_tokens(beam_width: int, length: int) -> dict[str, int]:
    """A deterministic beam that keeps all its tokens."""
    return Beams(beam_width, length, beam_width * length)._asdict()


def head_of(side: str) -> str:
    """The kind of head that a side drafts with, with which its name begins."""
    return side.partition("-")[0]


def side_of(
    name: str, entries: Sequence[Entry], heads: Mapping[str, str], eager: bool
) -> Side:
    """Make the side of SIDES whose engine can measure all its ``entries``."""
    plain = plain_side(name, eager)
    engine = {**plain.engine, "max_num_seqs": max(FIGURE6_BATCH_SIZES)}
    if name == PLAIN:
        return plain.model_copy(update={"engine": engine})
    trees = [e.cell.tree for e in entries if e.side == name and e.cell.tree]
    spec = {**SIDES[name], "model": heads[head_of(name)]}
    return side_of_trees(name, spec, trees, **engine)
