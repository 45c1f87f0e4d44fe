"""The walk of rules that first choose the next token and then look for a child."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from vllm_treespec.core.tree import TreeBatch
from vllm_treespec.scorers.base import ScorerOutput, empty_path

# From requests int64 [n] and nodes int64 [n] to the tokens after them, int64 [n].
NextToken = Callable[[Tensor, Tensor], Tensor]


def follow(tree: TreeBatch, next_token: NextToken) -> ScorerOutput:
    """Walk down each tree as long as a child holds the chosen token."""
    reqs = torch.arange(tree.num_reqs, device=tree.token_ids.device)
    path = empty_path(tree)
    num_accepted = torch.zeros_like(reqs)
    node = torch.zeros_like(reqs)
    next_tokens = next_token(reqs, node)
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
            next_tokens[walking] = next_token(walking, matched)
    return ScorerOutput(path, num_accepted, next_tokens)
