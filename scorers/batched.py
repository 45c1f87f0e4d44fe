"""What batched forms of rules share: groups of rows, node numbers, accepted paths.

A batched form computes all nodes of all trees together. The host knows all shapes and
never waits for the device, so a CUDA graph can hold a whole rule.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from vllm_treespec.sampling.draws import draw
from vllm_treespec.scorers.base import ScorerOutput, TargetLogits
from vllm_treespec.trees.sizes import TreeSizes
from vllm_treespec.trees.tree import (
    NO_NODE,
    TreeBatch,
    ancestor_bits,
    first_draw,
    num_draws,
)

# Distributions that are held side by side: 256 of 128 k tokens take 128 MiB in
# float32, and are enough work to fill a device.
ROWS_PER_GROUP = 256


def groups(rows: Tensor, width: int = 1) -> tuple[Tensor, ...]:
    """Split rows into groups that hold at most ``ROWS_PER_GROUP`` distributions.

    Args:
        rows: [n], at least one goes into every group.
        width: distributions of each row.

    """
    return rows.split(max(ROWS_PER_GROUP // width, 1))


def node_numbers(tree: TreeBatch) -> Tensor:
    """Every entry's node, int64 [num_reqs, max_nodes]; the root in unused entries."""
    columns = torch.arange(tree.max_nodes, device=tree.token_ids.device)
    return columns * tree.is_node()


def accepted_path(
    ancestors: Tensor, depths: Tensor, kept_bits: Tensor, sizes: TreeSizes
) -> tuple[Tensor, Tensor, Tensor]:
    """Find the path along which every node was kept below its parent.

    Args:
        ancestors: int64 [num_reqs, max_nodes], see ``ancestor_bits``.
        depths: int64 [num_reqs, max_nodes], 0 in unused entries.
        kept_bits: int64 [num_reqs], bit i is set iff node i was kept; at most one
            child of a node is, and the root need not be.
        sizes: the trees' bounds.

    Returns:
        path int64 [num_reqs, max_depth], its length and its last node, int64
        [num_reqs], 0 for the root.

    """
    accepted = (ancestors & ~(kept_bits | 1)[:, None]) == 0
    places = depths * accepted
    columns = torch.arange(depths.shape[1], device=depths.device)
    path = torch.full(
        (len(depths), max(sizes.max_depth, 1) + 1), NO_NODE, device=depths.device
    )
    # Column 0 takes the root and all that was not accepted.
    path.scatter_(1, places, columns.expand_as(places))
    last = (columns * (places > 0)).amax(dim=1)
    return path[:, 1:].contiguous(), places.amax(dim=1), last


@dataclass(frozen=True)
class NodeDraws:
    """The draws below nodes in the order in which they are tried; [max_tries, n]."""

    # int64 [n], the nodes and their requests
    reqs: Tensor
    nodes: Tensor
    # int64, places among the draws of a request
    tried: Tensor
    # bool, whether there is such a draw
    is_tried: Tensor
    # int64, the nodes that hold them, and their tokens
    children: Tensor
    tokens: Tensor
    # float64, the uniform numbers that accept them
    numbers: Tensor

    @classmethod
    def below(
        cls,
        tree: TreeBatch,
        uniforms: Tensor,
        sizes: TreeSizes,
        reqs: Tensor,
        parents: Tensor,
    ) -> NodeDraws:
        """The draws below these nodes, the first of all requests first."""
        draws = tree.draws
        assert draws is not None
        width, max_draws = parents.shape[1], draws.nodes.shape[1]
        reqs, nodes = reqs.repeat(width), parents.t().flatten()
        max_tries = min(sizes.max_siblings, max_draws)
        tries = torch.arange(max_tries, device=reqs.device)[:, None]
        is_tried = tries < num_draws(tree)[reqs, nodes]
        tried = (first_draw(tree)[reqs, nodes] + tries).clamp(0, max_draws - 1)
        children = draws.nodes[reqs, tried]
        tokens, numbers = tree.token_ids[reqs, children], uniforms[reqs, 1 + tried]
        return cls(reqs, nodes, tried, is_tried, children, tokens, numbers)

    def first_accepted(self, accepts: Tensor) -> Tensor:
        """The child that the first accepted draw of each node hit, int64 [n]; else 0.

        Args:
            accepts: bool [max_tries, n].

        """
        accepts = accepts & self.is_tried
        wins = accepts & (accepts.cumsum(dim=0) == 1)
        return (self.children * wins).sum(dim=0)


# From trees, the target's logits, uniform numbers, the trees' bounds, requests int64
# [n] and nodes of each, int64 [n, width], to the accepted child of every node, int64
# [n, width], 0 where none was, and of those nodes the law of the next token, [width, n,
# vocab_size].
TryDraws = Callable[
    [TreeBatch, TargetLogits, Tensor, TreeSizes, Tensor, Tensor], tuple[Tensor, Tensor]
]


def score_by_node(
    tree: TreeBatch,
    target: TargetLogits,
    uniforms: Tensor,
    sizes: TreeSizes,
    try_draws: TryDraws,
    copies: int = 1,
) -> ScorerOutput:
    """Try the draws of all nodes, as if a walk stood at each of them.

    The accepted nodes are those whose ancestors were all accepted below their parents.

    Args:
        tree: drafts with ``draws``.
        target: the target's logits at the nodes.
        uniforms: float64 [num_reqs, at least 1 + max_draws] in [0, 1): column 0 for
            the last token.
        sizes: the trees' bounds.
        try_draws: the rule's part.
        copies: as often it holds what other rules do of a node.

    """
    parents = parents_with_draws(tree, sizes)
    reqs = torch.arange(tree.num_reqs, device=parents.device)
    width = copies * parents.shape[1]
    parts = [
        _score_group(tree, target, uniforms, sizes, try_draws, group, parents[group])
        for group in groups(reqs, width)
    ]
    return ScorerOutput(
        torch.cat([part.path for part in parts]),
        torch.cat([part.num_accepted for part in parts]),
        torch.cat([part.next_token_ids for part in parts]),
    )


def parents_with_draws(tree: TreeBatch, sizes: TreeSizes) -> Tensor:
    """Each request's nodes with draws, those with the most first, int64.

    Returns:
        [num_reqs, at most max_parents]; nodes without draws fill the rows.

    """
    assert tree.draws is not None
    width = max(min(sizes.max_parents, tree.draws.nodes.shape[1]), 1)
    order = num_draws(tree).argsort(dim=1, descending=True, stable=True)
    # The last node is a leaf, without draws: entries that hold no node become it.
    leaf = (tree.num_nodes - 1).clamp(min=0)
    return torch.minimum(order[:, :width], leaf[:, None])


def _score_group(
    tree: TreeBatch,
    target: TargetLogits,
    uniforms: Tensor,
    sizes: TreeSizes,
    try_draws: TryDraws,
    reqs: Tensor,
    parents: Tensor,
) -> ScorerOutput:
    """Score the trees of the requests ``reqs``, int64 [n]; see ``TryDraws``."""
    below, residual = try_draws(tree, target, uniforms, sizes, reqs, parents)
    # Bit 0 is no child's: it is set where none was accepted.
    bits = (torch.ones_like(below) << below) & ~1
    ancestors = ancestor_bits(tree, sizes.max_depth)[reqs]
    path, num_accepted, last = accepted_path(
        ancestors, tree.depths[reqs], bits.sum(dim=1), sizes
    )
    is_last = parents == last[:, None]
    place = is_last.int().argmax(dim=1)
    columns = torch.arange(len(reqs), device=reqs.device)
    law = torch.where(
        is_last.any(dim=1, keepdim=True),
        residual[place, columns],
        target.probs(reqs, last),
    )
    return ScorerOutput(path, num_accepted, draw(law, uniforms[reqs, 0]))
