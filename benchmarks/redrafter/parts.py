"""What each table and figure of the ReDrafter paper needs to be run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from pydantic import BaseModel

from vllm_treespec.tools.sides import PLAIN

PARTS = ("table1", "table2", "figure5", "figure6")
# Their answers are scored under the target.
TABLES = ("table1", "table2")
# arXiv 2401.10774, section 3.3.2: delta is the square root of epsilon.
LOSSY = {"epsilon": 0.09, "delta": 0.3}
# An engine each; its spec-config without the head and the trees.
SIDES: dict[str, dict[str, Any]] = {
    PLAIN: {},
    "medusa": {"method": "medusa_tree"},
    "medusa-typical": {"method": "medusa_tree", "lossy_typical_acceptance": LOSSY},
    "redrafter": {"method": "redrafter"},
    "redrafter-typical": {"method": "redrafter", "lossy_typical_acceptance": LOSSY},
    "redrafter-stochastic": {"method": "redrafter", "beam_search": "stochastic"},
}
TYPICAL_TEMPERATURE = 0.7
TABLE2_TEMPERATURES = (0.1, 0.3, 0.5, 0.7, 0.9)
TABLE2_SIDES = {
    PLAIN: "plain sampling",
    "redrafter": "rejection",
    "redrafter-typical": "typical (lossy)",
    "redrafter-stochastic": "stochastic beam",
}
FIGURE5_WIDTHS = (1, 2, 4, 8, 12)
FIGURE5_LENGTH = 5
# How many stretches of equal length figure 5a divides an answer into.
FIGURE5_STRETCHES = 4
FIGURE6_WIDTHS = (2, 8)
FIGURE6_BATCH_SIZES = (1, 2, 4, 8, 16)
# How labels of beams without tree attention end.
WITHOUT = ", no tree attention"


def head_of(side: str) -> str:
    """The kind of head that a side drafts with, with which its name begins."""
    return side.partition("-")[0]


class Beams(NamedTuple):
    """The tree of both tables; Medusa's has as many draft tokens."""

    beam_width: int
    length: int
    num_drafts: int


class Run(BaseModel):
    """One side at one temperature and batch size, with one tree."""

    side: str
    # keys of the spec-config that shape the tree; None: plain decoding
    tree: dict[str, int] | None = None
    temperature: float = 0.0
    batch_size: int = 1
    max_tokens: int
    # False: every beam is verified as a chain of its own
    tree_attention: bool = True
    # note the tokens of every step
    traced: bool = False

    @property
    def name(self) -> str:
        """Name of its files."""
        tree = "x".join(map(str, (self.tree or {}).values()))
        parts = [f"{self.side}-{tree}" if tree else self.side]
        if not self.tree_attention:
            parts.append("chains")
        parts.append(f"t{self.temperature:g}.b{self.batch_size}.n{self.max_tokens}")
        return ".".join([*parts, "traced"] if self.traced else parts)

    @property
    def num_candidates(self) -> int:
        """Draft tokens of all beams before equal prefixes are merged."""
        tree = self.tree or {}
        return tree.get("beam_width", 0) * tree.get("length", 0)


class Entry(BaseModel):
    """A row of a table or a point of a figure."""

    part: str
    label: str
    run: Run


@dataclass(frozen=True)
class Sizes:
    """What the user chooses."""

    beams: Beams
    max_tokens: int

    def entries(self, parts: Sequence[str]) -> list[Entry]:
        """All rows and points of these parts."""
        makers = {
            "table1": self.table1,
            "table2": self.table2,
            "figure5": self.figure5,
            "figure6": self.figure6,
        }
        return [
            Entry(part=part, label=label, run=run)
            for part in parts
            for label, run in makers[part]()
        ]

    def run(self, side: str, temperature: float = 0.0) -> Run:
        """One run for a table."""
        return Run(
            side=side,
            tree=self.tree(side),
            temperature=temperature,
            max_tokens=self.max_tokens,
        )

    def tree(self, side: str) -> dict[str, int] | None:
        """The tables' tree of a side; a stochastic beam keeps all its tokens."""
        tree = self.beams._asdict()
        if side == PLAIN:
            return None
        if side.startswith("medusa"):
            return {"num_drafts": tree["num_drafts"]}
        if side == "redrafter-stochastic":
            del tree["num_drafts"]
        return tree

    def table1(self) -> Iterator[tuple[str, Run]]:
        """Medusa and ReDrafter, greedy and typical, with what they compare with."""
        warm = TYPICAL_TEMPERATURE
        yield "plain, greedy", self.run(PLAIN)
        yield "Medusa, greedy", self.run("medusa")
        yield "ReDrafter, greedy", self.run("redrafter")
        yield f"plain, T = {warm}", self.run(PLAIN, warm)
        yield "Medusa, typical (lossy)", self.run("medusa-typical", warm)
        yield "ReDrafter, typical (lossy)", self.run("redrafter-typical", warm)
        yield "plain, T = 1", self.run(PLAIN, 1.0)

    def table2(self) -> Iterator[tuple[str, Run]]:
        """Ways of acceptance at each temperature."""
        yield "plain greedy", self.run(PLAIN)
        for side, label in TABLE2_SIDES.items():
            for temperature in TABLE2_TEMPERATURES:
                yield label, self.run(side, temperature)

    def figure5(self) -> Iterator[tuple[str, Run]]:
        """Beam widths, with answers of twice the length; all tokens are kept."""
        for width in FIGURE5_WIDTHS:
            tree = all_tokens(width, FIGURE5_LENGTH)
            run = Run(
                side="redrafter",
                tree=tree,
                max_tokens=2 * self.max_tokens,
                traced=True,
            )
            yield f"beam width {width}", run

    def figure6(self) -> Iterator[tuple[str, Run]]:
        """Batch sizes, with and without tree attention."""
        for batch_size in FIGURE6_BATCH_SIZES:
            plain = Run(side=PLAIN, batch_size=batch_size, max_tokens=self.max_tokens)
            yield "plain", plain
            for width in FIGURE6_WIDTHS:
                tree = all_tokens(width, self.beams.length)
                beams = {"side": "redrafter", "tree": tree}
                with_it = plain.model_copy(update=beams)
                yield f"ReDrafter, {width} beams", with_it
                without = with_it.model_copy(update={"tree_attention": False})
                yield f"ReDrafter, {width} beams{WITHOUT}", without


def all_tokens(beam_width: int, length: int) -> dict[str, int]:
    """A deterministic beam that keeps all its tokens."""
    return Beams(beam_width, length, beam_width * length)._asdict()


def distinct(entries: Sequence[Entry]) -> list[Run]:
    """The runs, each once, those of one engine together."""
    runs = {entry.run.name: entry.run for entry in entries}
    return sorted(runs.values(), key=lambda run: list(SIDES).index(run.side))
