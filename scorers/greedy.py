"""Greedy matching: follow the target's most likely tokens down the tree."""

from __future__ import annotations

import torch

from vllm_treespec.scorers.base import ScorerOutput, TargetLogits, empty_path
from vllm_treespec.tree import TreeBatch


def greedy_matching(tree: TreeBatch, target: TargetLogits) -> ScorerOutput:
    """Accept the longest path that plain greedy decoding would have produced.

    Lossless at temperature 0: the emitted tokens are the target's own.
    """
    device = tree.token_ids.device
    reqs = torch.arange(tree.num_reqs, device=device)
    path = empty_path(tree)
    num_accepted = torch.zeros_like(reqs)
    node = torch.zeros_like(reqs)
    next_tokens = target.argmax(reqs, node)
    walking = reqs
    while walking.numel():
        children = tree.parents[walking] == node[walking, None]
        matches = children & (tree.token_ids[walking] == next_tokens[walking, None])
        found = matches.any(dim=1)
        walking, matched = walking[found], matches[found].int().argmax(dim=1)
        path[walking, num_accepted[walking]] = matched
        num_accepted[walking] += 1
        node[walking] = matched
        if walking.numel():
            next_tokens[walking] = target.argmax(walking, matched)
    return ScorerOutput(path, num_accepted, next_tokens)
