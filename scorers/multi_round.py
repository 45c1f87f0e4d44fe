"""Multi-round rejection sampling, SpecInfer's rule."""

from __future__ import annotations

from torch import Tensor

from vllm_treespec.scorers.base import Rule, ScorerOutput, TargetLogits
from vllm_treespec.scorers.recursive_rejection import (
    recursive_rejection,
    recursive_rejection_batched,
)
from vllm_treespec.trees.sizes import TreeSizes
from vllm_treespec.trees.tree import TreeBatch


def multi_round(
    tree: TreeBatch, target: TargetLogits, uniforms: Tensor
) -> ScorerOutput:
    """Walk down each tree, trying independent draws one after another.

    Lossless (arXiv 2305.09781, theorem 4.2). It is the walk of recursive rejection
    on draws that do not come from what earlier ones left over: they may be drawn from
    several draft distributions and repeat each other. A token that was drawn k times
    is tried k times, each time against the residual that the earlier tries left;
    algorithm 2 there tries the nodes of the merged tree, which would be lossy.

    Args:
        tree: drafts with ``draws``.
        target: the target's logits at the nodes.
        uniforms: float64 [num_reqs, at least 1 + max_draws] in [0, 1).

    """
    return recursive_rejection(tree, target, uniforms)


def multi_round_batched(
    tree: TreeBatch, target: TargetLogits, uniforms: Tensor, sizes: TreeSizes
) -> ScorerOutput:
    """Do what ``multi_round`` does, for all nodes together.

    Args:
        tree: drafts with ``draws``.
        target: the target's logits at the nodes.
        uniforms: float64 [num_reqs, at least 1 + max_draws] in [0, 1).
        sizes: the trees' bounds.

    """
    return recursive_rejection_batched(tree, target, uniforms, sizes)


MULTI_ROUND = Rule("multi_round", multi_round, multi_round_batched)
