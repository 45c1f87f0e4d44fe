"""Greedy matching: follow the target's most likely tokens down the tree."""

from __future__ import annotations

from vllm_treespec.core.tree import TreeBatch
from vllm_treespec.scorers.base import ScorerOutput, TargetLogits
from vllm_treespec.scorers.following import follow


def greedy_matching(tree: TreeBatch, target: TargetLogits) -> ScorerOutput:
    """Accept the longest path that plain greedy decoding would have produced.

    Lossless at temperature 0: the emitted tokens are the target's own.
    """
    return follow(tree, target.argmax)
