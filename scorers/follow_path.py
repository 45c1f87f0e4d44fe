"""Follow a path: for rules that first choose the next token, then look for a child."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from vllm_treespec.scorers.base import ScorerOutput, path_width
from vllm_treespec.scorers.batched import accepted_path, groups, node_numbers
from vllm_treespec.trees.sizes import TreeSizes
from vllm_treespec.trees.tree import NO_NODE, TreeBatch, ancestor_bits, node_bits

# From requests and a node of each to the tokens after these nodes.
NextToken = Callable[[Sequence[int], Sequence[int]], Sequence[int]]
# The same on the device: int64 [n] each.
DrawTokens = Callable[[Tensor, Tensor], Tensor]


def follow_path(tree: TreeBatch, next_token: NextToken) -> ScorerOutput:
    """Walk down each tree as long as a child holds the chosen token."""
    # of each tree: (parent, token) -> node
    children = [
        dict(zip(zip(parents, tokens, strict=True), range(tree.max_nodes), strict=True))
        for parents, tokens in zip(
            tree.parents.tolist(), tree.token_ids.tolist(), strict=True
        )
    ]
    paths: list[list[int]] = [[] for _ in children]
    next_tokens = [0] * len(children)
    # requests, and the nodes that they have come to
    walking = dict.fromkeys(range(len(children)), 0)
    while walking:
        chosen = next_token(list(walking), list(walking.values()))
        reached = {}
        for (req, node), token in zip(walking.items(), chosen, strict=True):
            next_tokens[req] = token
            child = children[req].get((node, token))
            if child is not None:
                reached[req] = child
                paths[req].append(child)
        walking = reached
    width, device = path_width(tree), tree.token_ids.device
    padded = [path + [NO_NODE] * (width - len(path)) for path in paths]
    return ScorerOutput(
        path=torch.tensor(padded, device=device),
        num_accepted=torch.tensor([len(path) for path in paths], device=device),
        next_token_ids=torch.tensor(next_tokens, device=device),
    )


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


def follow_draws(tree: TreeBatch, draw_tokens: DrawTokens) -> ScorerOutput:
    """Walk down each tree as long as a child holds the drawn token."""

    def next_token(reqs: Sequence[int], nodes: Sequence[int]) -> list[int]:
        places = torch.tensor([reqs, nodes], device=tree.token_ids.device)
        tokens: list[int] = draw_tokens(*places).tolist()
        return tokens

    return follow_path(tree, next_token)


def follow_draws_batched(
    tree: TreeBatch, draw_tokens: DrawTokens, sizes: TreeSizes
) -> ScorerOutput:
    """Do what ``follow_draws`` does, for all nodes together.

    Args:
        tree: drafts.
        draw_tokens: the host must not wait for the device in it.
        sizes: the trees' bounds; only the depth is used.

    """
    nodes = node_numbers(tree)
    reqs = torch.arange(tree.num_reqs, device=nodes.device)[:, None].expand_as(nodes)
    drawn = [
        draw_tokens(req, node)
        for req, node in zip(
            groups(reqs.flatten()), groups(nodes.flatten()), strict=True
        )
    ]
    return follow_path_batched(tree, torch.cat(drawn).view_as(nodes), sizes)
