"""Follow a path: for rules that first choose the next token, then look for a child."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from vllm_treespec.core.sizes import TreeSizes
from vllm_treespec.core.tree import TreeBatch, ancestor_bits, node_bits
from vllm_treespec.scorers.base import ScorerOutput, empty_path
from vllm_treespec.scorers.batched import accepted_path

# From requests int64 [n] and nodes int64 [n] to the tokens after them, int64 [n].
NextToken = Callable[[Tensor, Tensor], Tensor]


def follow_path(tree: TreeBatch, next_token: NextToken) -> ScorerOutput:
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


def follow_path_batched(
    tree: TreeBatch, next_tokens: Tensor, sizes: TreeSizes
) -> ScorerOutput:
    """Accept the longest path along which every token is the one chosen before it.

    Args:
        tree: drafts.
        next_tokens: int64 [num_reqs, max_nodes], the token chosen after each node.
        sizes: the trees' bounds; only the depth is used.

    """
    wanted = next_tokens.gather(1, tree.parents.clamp(min=0))
    kept = (tree.parents >= 0) & (tree.token_ids == wanted)
    path, num_accepted, last = accepted_path(
        ancestor_bits(tree, sizes.max_depth),
        tree.depths,
        (node_bits(tree) * kept).sum(dim=1),
        sizes,
    )
    return ScorerOutput(path, num_accepted, next_tokens.gather(1, last[:, None])[:, 0])
