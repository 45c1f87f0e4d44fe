"""The paper's trees: experiment 1 by draft length, experiment 2 by target budget."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import prod
from operator import mul
from typing import Any, NamedTuple


class BudgetTrees(NamedTuple):
    """Branching factors, and (width, depth); the first are those of `--trees one`."""

    rsd_c: tuple[tuple[int, ...], ...]
    rsd_s: tuple[tuple[int, int], ...]


# arXiv 2402.14160, appendix D.3.2: budget = draft tokens the target reads at once, and
# the depth of the chain (SD). Three vectors of RSD-C are printed there one level short
# of their budget (14: [2,1,1,1,1,1], 21: [3,1,1,1,1,1], 30: [5,1,1,1,1]); here they
# fill it, as all others do.
PAPER_TREES = {
    6: BudgetTrees(((2, 2), (2, 1, 1), (3, 1)), ((2, 3), (3, 2))),
    10: BudgetTrees(((2, 2, 1), (2, 1, 1, 1, 1), (5, 1)), ((2, 5), (5, 2))),
    14: BudgetTrees(((2, 2, 2), (2, 1, 1, 1, 1, 1, 1), (7, 1)), ((2, 7), (7, 2))),
    21: BudgetTrees(((3, 2, 2), (3, 1, 1, 1, 1, 1, 1), (7, 1, 1)), ((3, 7), (7, 3))),
    30: BudgetTrees(
        ((2, 2, 2, 2), (5, 1, 1, 1, 1, 1), (6, 1, 1, 1, 1)), ((5, 6), (6, 5))
    ),
}
# arXiv 2402.14160, appendix D.3.1: draft length, the depth of all its trees. The pairs
# of RSD-S are those of SpecTr too, in both experiments: (number of paths, depth).
LENGTH_TREES = {
    2: BudgetTrees(((2, 2), (2, 1), (3, 1)), ((2, 2), (3, 2))),
    3: BudgetTrees(((2, 2, 2), (3, 1, 1), (4, 1, 1)), ((3, 3), (4, 3))),
    4: BudgetTrees(((2, 2, 2, 2), (5, 1, 1, 1), (7, 1, 1, 1)), ((5, 4), (7, 4))),
    5: BudgetTrees(
        ((2, 2, 2, 2, 2), (6, 1, 1, 1, 1), (12, 1, 1, 1, 1)), ((6, 5), (12, 5))
    ),
}
EXPERIMENTS = {"lengths": LENGTH_TREES, "budgets": PAPER_TREES}
METHODS = ("sd", "spectr", "rsd_c", "rsd_s")
# Keys of the spec-config that hold a tree's numbers, one each.
KEYS = {
    "sd": ("depth",),
    "spectr": ("num_paths", "depth"),
    "rsd_s": ("beam_width", "depth"),
}


@dataclass(frozen=True)
class Tree:
    """A method with the numbers that make its tree: branching factors, or KEYS."""

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
        return prod(self.numbers)

    @property
    def shape(self) -> dict[str, Any]:
        """Keys of the spec-config that make this tree."""
        if self.method == "rsd_c":
            return {"branching_factors": list(self.numbers)}
        return dict(zip(KEYS[self.method], self.numbers, strict=True))

    def spec_config(self, draft: str) -> dict[str, Any]:
        """Spec-config of this tree."""
        rule = {"scorer": "k_seq"} if self.method == "spectr" else {}
        return {"method": self.method, "model": draft, **self.shape, **rule}


def trees_of(experiment: str) -> dict[int, list[Tree]]:
    """Trees of an experiment by size; a chain (SD) is as long as the size."""
    return {
        size: [
            Tree(method, numbers)
            for method in METHODS
            for numbers in {"sd": ((size,),), "rsd_c": rsd_c}.get(method, rsd_s)
        ]
        for size, (rsd_c, rsd_s) in EXPERIMENTS[experiment].items()
    }


def tree_of(method: str, shape: Mapping[str, Any]) -> Tree:
    """Read a tree from the keys of its spec-config."""
    return Tree(method, tuple(shape.get("branching_factors") or shape.values()))


def all_trees(experiments: Sequence[str] = tuple(EXPERIMENTS)) -> list[Tree]:
    """Trees of the experiments, one method after the other, each once."""
    sizes = [trees for name in experiments for trees in trees_of(name).values()]
    trees = dict.fromkeys(tree for size_trees in sizes for tree in size_trees)
    return sorted(trees, key=lambda tree: METHODS.index(tree.method))
