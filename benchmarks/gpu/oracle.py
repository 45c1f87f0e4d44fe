"""Trees of a fixed shape and a fixed rate of acceptance (torch only).

What is generated with them is nonsense: drafts are random tokens, and how many of them
are accepted is decided by coins, not by the target. Only the time counts: it is that
of a step in which a drafter that costs nothing has its drafts accepted at that rate.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from vllm_treespec.core.sizes import TreeSizes
from vllm_treespec.core.tree import NO_NODE, TreeBatch
from vllm_treespec.proposers import Proposer, ProposerInputs
from vllm_treespec.scorers import ScorerOutput


def level_widths(num_nodes: int, depth: int) -> list[int]:
    """Nodes of each level, the root's first: as even as possible, wide ones first."""
    each, more = divmod(num_nodes - 1, depth) if depth else (0, 0)
    return [1] + [each + (level < more) for level in range(depth)]


def default_depth(num_nodes: int) -> int:
    """Levels below the root: about as many as nodes a level."""
    return round((num_nodes - 1) ** 0.5)


def fixed_parents(num_nodes: int, depth: int) -> list[int]:
    """Parents of the tree: every level spread evenly over the one above it.

    Raises:
        ValueError: when the tree cannot have this depth.

    """
    if not min(1, num_nodes - 1) <= depth <= num_nodes - 1:
        raise ValueError(f"a tree of {num_nodes} nodes cannot have {depth} levels")
    widths = level_widths(num_nodes, depth)
    parents = [NO_NODE]
    first = 0
    for above, width in pairwise(widths):
        parents += [first + node * above // width for node in range(width)]
        first += above
    return parents


def last_path(parents: list[int]) -> list[int]:
    """Draft nodes from the top down to the last node, which lies in the last level."""
    path = []
    node = len(parents) - 1
    while node:
        path.append(node)
        node = parents[node]
    return path[::-1]


class OracleProposer(Proposer):
    """Draws random tokens into a tree of a fixed shape, in no time."""

    name = "oracle"
    num_draft_models = 0

    def __init__(self, num_nodes: int, depth: int, vocab_size: int) -> None:
        """Take the tree's nodes, root included, its levels, and what to draw from."""
        self.parents = fixed_parents(num_nodes, depth)
        widths = level_widths(num_nodes, depth)
        self.depths = [d for d, width in enumerate(widths) for _ in range(width)]
        self.vocab_size = vocab_size
        self.sizes = TreeSizes(
            max_nodes=num_nodes,
            max_depth=depth,
            max_width=max(widths),
            max_leaves=num_nodes - len(set(self.parents) - {NO_NODE}),
            num_uniforms=num_nodes - 1,
        )

    def propose(self, inputs: ProposerInputs) -> TreeBatch:
        """Make one tree per request; ``draws`` is None, as of deterministic drafts."""
        roots = inputs.root_token_ids
        num_reqs, device = len(roots), roots.device
        drawn = (inputs.uniforms * self.vocab_size).long()
        shape = (num_reqs, -1)
        return TreeBatch(
            token_ids=torch.cat([roots[:, None], drawn], dim=1),
            parents=torch.tensor(self.parents, device=device).expand(shape),
            depths=torch.tensor(self.depths, device=device).expand(shape),
            num_nodes=torch.full((num_reqs,), self.sizes.max_nodes, device=device),
        )


def accept_by_coins(
    tree: TreeBatch,
    path: Tensor,
    acceptance: float,
    uniforms: Tensor,
    next_token_ids: Tensor,
) -> ScorerOutput:
    """Accept the nodes of a fixed path, each with the same probability.

    Depth k is reached with probability ``acceptance ** k``, as far as the tree has
    not been cut above it.

    Args:
        tree: the trees.
        path: int64 [depth], draft nodes from the top, ascending.
        acceptance: probability to accept a node once its parent is accepted.
        uniforms: [num_reqs, at least depth] in [0, 1).
        next_token_ids: int64 [num_reqs], emitted after the accepted nodes.

    """
    heads = uniforms[:, : len(path)] < acceptance
    there = path < tree.num_nodes[:, None]
    accepted = (heads & there).long().cumprod(dim=1)
    return ScorerOutput(
        path=torch.where(accepted > 0, path, NO_NODE),
        num_accepted=accepted.sum(dim=1),
        next_token_ids=next_token_ids,
    )
