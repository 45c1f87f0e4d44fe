"""What a measured schedule chooses from."""

from __future__ import annotations

import math
from dataclasses import dataclass

from vllm_treespec.schedule.base import ScheduledTree


@dataclass(frozen=True)
class Option:
    """A tree of the schedule, or plain decoding."""

    # None: plain
    index: int | None
    # draft nodes at most
    num_drafts: int
    # accepted tokens that are thought likely before anything was measured
    guess: float
    # whether an index drafts it alone: what is accepted of one tells nothing of trees
    # that a model drafts
    is_free: bool = False
    # whether its proposer leaves out drafts that promise less than their price
    weighs_drafts: bool = False
    # that draft models read
    num_levels: int = 0

    def share(self, limit: int) -> float:
        """The part of the tree that a request's own limit leaves."""
        return min(limit / self.num_drafts, 1.0)


def guessed_accepted(tree: ScheduledTree, beside_index: bool) -> float:
    """Accepted tokens that a tree of good drafts would have; hopeful.

    Of a model that drafts ``beside_index`` those that it adds.
    """
    sizes = tree.sizes
    rate = min(0.6 + 0.08 * math.log2(sizes.max_leaves), 0.85)
    depth = sizes.draft_depth if beside_index else sizes.max_depth
    return sum(rate**level for level in range(1, depth + 1))
