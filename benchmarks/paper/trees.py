"""The paper's trees: experiment 1 by draft length, experiment 2 by target budget."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import mul
from typing import Any

from benchmarks.sides import PAPER_TREES, BudgetTrees

METHODS = ("sd", "spectr", "rsd_c", "rsd_s")
EXPERIMENTS = ("lengths", "budgets")

# arXiv 2402.14160, appendix D.3.1: draft length, the depth of all its trees. The pairs
# of RSD-S are those of SpecTr too, in both experiments: (number of paths, depth).
LENGTH_TREES = {
    2: BudgetTrees(rsd_c=((2, 2), (2, 1), (3, 1)), rsd_s=((2, 2), (3, 2))),
    3: BudgetTrees(rsd_c=((2, 2, 2), (3, 1, 1), (4, 1, 1)), rsd_s=((3, 3), (4, 3))),
    4: BudgetTrees(
        rsd_c=((2, 2, 2, 2), (5, 1, 1, 1), (7, 1, 1, 1)), rsd_s=((5, 4), (7, 4))
    ),
    5: BudgetTrees(
        rsd_c=((2, 2, 2, 2, 2), (6, 1, 1, 1, 1), (12, 1, 1, 1, 1)),
        rsd_s=((6, 5), (12, 5)),
    ),
}


@dataclass(frozen=True)
class Tree:
    """A method with the numbers that make its tree.

    numbers: sd: (depth,); spectr and rsd_s: (width, depth); rsd_c: branching factors.
    """

    method: str
    numbers: tuple[int, ...]

    @property
    def name(self) -> str:
        """Name of files and table rows."""
        between = "." if self.method == "rsd_c" else "x"
        return f"{self.method}-{between.join(map(str, self.numbers))}"

    @property
    def depth(self) -> int:
        """Levels below the root."""
        return len(self.numbers) if self.method == "rsd_c" else self.numbers[-1]

    @property
    def num_drafts(self) -> int:
        """Draft tokens that the target reads at once, at most."""
        if self.method == "rsd_c":
            return sum(accumulate(self.numbers, mul))
        return self.numbers[0] * (self.depth if len(self.numbers) == 2 else 1)

    @property
    def shape(self) -> dict[str, Any]:
        """Keys of the spec-config that make this tree."""
        if self.method == "sd":
            return {"depth": self.depth}
        if self.method == "rsd_c":
            return {"branching_factors": list(self.numbers)}
        width = {"spectr": "num_paths", "rsd_s": "beam_width"}[self.method]
        return {width: self.numbers[0], "depth": self.depth}

    def spec_config(self, draft: str) -> dict[str, Any]:
        """Spec-config of this tree."""
        spec = {"method": self.method, "model": draft, **self.shape}
        rule = {"scorer": "k_seq"} if self.method == "spectr" else {}
        return {**spec, **rule}


def trees_of(
    experiment: str, methods: Sequence[str] = METHODS
) -> dict[int, list[Tree]]:
    """Trees of an experiment by draft length or target budget, best one unknown."""
    table = LENGTH_TREES if experiment == "lengths" else PAPER_TREES
    return {
        size: [
            Tree(method, numbers)
            for method in METHODS
            if method in methods
            for numbers in shapes(method, size, trees)
        ]
        for size, trees in table.items()
    }


def shapes(method: str, size: int, trees: BudgetTrees) -> tuple[tuple[int, ...], ...]:
    """Numbers of a method's trees; a chain is as long as the length or the budget."""
    if method == "sd":
        return ((size,),)
    return trees.rsd_c if method == "rsd_c" else trees.rsd_s
