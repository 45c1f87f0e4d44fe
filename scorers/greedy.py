"""Greedy matching: follow the target's most likely tokens down the tree."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from vllm_treespec.sampling.laws import likeliest
from vllm_treespec.scorers.base import Rule, ScorerOutput, TargetLogits
from vllm_treespec.scorers.batched import node_numbers
from vllm_treespec.scorers.follow_path import (
    follow_draws,
    follow_draws_batched,
    follow_path,
    follow_path_batched,
)
from vllm_treespec.trees.sizes import TreeSizes
from vllm_treespec.trees.tree import TreeBatch


def greedy_matching(
    tree: TreeBatch, target: TargetLogits, uniforms: Tensor
) -> ScorerOutput:
    """Accept the longest path that plain greedy decoding would have produced.

    Lossless at temperature 0: the emitted tokens are the target's own.

    Args:
        tree: drafts; ``draws`` is not used.
        target: the target's logits at the nodes.
        uniforms: not used; part of every rule's signature.

    """
    if target.penalties is not None:
        return follow_draws(tree, target.argmax)
    roots = target.root_rows.tolist()

    def next_token(reqs: Sequence[int], nodes: Sequence[int]) -> list[int]:
        both = zip(reqs, nodes, strict=True)
        return likeliest(target.logits, [roots[req] + node for req, node in both])

    return follow_path(tree, next_token)


def greedy_matching_batched(
    tree: TreeBatch, target: TargetLogits, uniforms: Tensor, sizes: TreeSizes
) -> ScorerOutput:
    """Do what ``greedy_matching`` does, for all nodes together.

    Args:
        tree: drafts; ``draws`` is not used.
        target: the target's logits at the nodes.
        uniforms: not used; part of every rule's signature.
        sizes: the trees' bounds; only the depth is used.

    """
    if target.penalties is not None:
        return follow_draws_batched(tree, target.argmax, sizes)
    best = target.logits.to(torch.float32).argmax(dim=-1)
    next_tokens = best[target.root_rows[:, None] + node_numbers(tree)]
    return follow_path_batched(tree, next_tokens, sizes)


GREEDY_MATCHING = Rule("greedy_matching", greedy_matching, greedy_matching_batched)
