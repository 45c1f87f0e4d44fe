"""Batched forms of rules, with bounds that are taken from the trees."""

from __future__ import annotations

from torch import Tensor

from tests.fast.drawn_trees import Plan, Planned
from vllm_treespec.core.tree import TreeBatch, num_draws
from vllm_treespec.scorers import ScorerOutput, TargetLogits, TreeShape
from vllm_treespec.scorers.recursive_rejection import recursive_rejection_batched
from vllm_treespec.scorers.target_draw import target_draw_batched

# Model 0 without replacement, then model 1 independently, twice.
MIXED: Plan = [[Planned(), Planned(from_rest=True), Planned(0, 1), Planned(0, 1)]]


def shape_of(tree: TreeBatch) -> TreeShape:
    """The tightest bounds."""
    if tree.draws is None:
        return TreeShape(int(tree.depths.max()), 0, 0)
    counts = num_draws(tree)
    return TreeShape(
        max_depth=int(tree.depths.max()),
        max_siblings=int(counts.amax()),
        max_parents=int((counts > 0).sum(1).max()),
    )


def rejection(tree: TreeBatch, target: TargetLogits, uniforms: Tensor) -> ScorerOutput:
    return recursive_rejection_batched(tree, target, uniforms, shape_of(tree))


def drawing(tree: TreeBatch, target: TargetLogits, uniforms: Tensor) -> ScorerOutput:
    return target_draw_batched(tree, target, uniforms, shape_of(tree))
