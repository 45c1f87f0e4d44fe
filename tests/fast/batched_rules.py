"""Batched forms of rules, with bounds that are taken from the trees."""

from __future__ import annotations

from torch import Tensor

from tests.fast.drawn_trees import Plan, Planned
from vllm_treespec.scorers import ScorerOutput, TargetLogits
from vllm_treespec.scorers.recursive_rejection import recursive_rejection_batched
from vllm_treespec.trees.sizes import TreeSizes
from vllm_treespec.trees.tree import MAX_NODES, TreeBatch, num_draws

# Model 0 without replacement, then model 1 independently, twice.
MIXED: Plan = [
    [Planned(), Planned(without_replacement=True), Planned(0, 1), Planned(0, 1)]
]


def tree_sizes(
    max_depth: int, max_siblings: int = 0, max_parents: int = 0
) -> TreeSizes:
    """Bounds as far as rules look at them."""
    return TreeSizes(
        max_nodes=MAX_NODES,
        max_depth=max_depth,
        max_width=MAX_NODES,
        max_leaves=MAX_NODES,
        max_siblings=max_siblings,
        max_parents=max_parents,
    )


def sizes_of(tree: TreeBatch) -> TreeSizes:
    """The tightest bounds."""
    depth = int(tree.depths.max())
    if tree.draws is None:
        return tree_sizes(depth)
    counts = num_draws(tree)
    return tree_sizes(depth, int(counts.amax()), int((counts > 0).sum(1).max()))


def rejection(tree: TreeBatch, target: TargetLogits, uniforms: Tensor) -> ScorerOutput:
    return recursive_rejection_batched(tree, target, uniforms, sizes_of(tree))
