"""Medusa: one tree for all steps, filled with the likeliest tokens of each level."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

from vllm_treespec.proposers.base import (
    Proposer,
    ProposerInputs,
    tokens_of,
)
from vllm_treespec.trees.draft import Draft
from vllm_treespec.trees.sizes import TreeSizes
from vllm_treespec.trees.tree import NO_NODE, TreeBatch

# A node by the ranks from the root down to it: (0, 2) is the third guess of the
# second level below the first guess of the first.
RankPath = tuple[int, ...]


def sizes(num_drafts: int) -> TreeSizes:
    """Bounds on the sizes of any tree of ``num_drafts`` draft tokens."""
    return TreeSizes(
        max_nodes=1 + num_drafts,
        max_depth=num_drafts,
        max_width=num_drafts,
        max_leaves=num_drafts,
    )


def sizes_of_tree(paths: Sequence[RankPath]) -> TreeSizes:
    """Sizes of the tree with these nodes, in level order and without the root."""
    widths = Counter(map(len, paths))
    inner = {path[:-1] for path in paths}
    return TreeSizes(
        max_nodes=1 + len(paths),
        max_depth=len(paths[-1]),
        max_width=max(widths.values()),
        max_leaves=len(set(paths) - inner),
    )


def claims_of_tree(
    paths: Sequence[RankPath], rank_accuracies: Sequence[Sequence[float]]
) -> Tensor:
    """Product of the accuracies along each node's path, float64 [1 + num_paths].

    The first entry, of the root, is 0.
    """
    products = [
        prod(rank_accuracies[level][rank] for level, rank in enumerate(path))
        for path in paths
    ]
    return torch.tensor([0.0, *products], dtype=torch.float64)


class Medusa(Proposer):
    """Drafts the static tree of arXiv 2401.10774, section 2.3.3.

    The tree grows once, from how often each level's guess of each rank was right: the
    next node is the one whose path has the highest product of accuracies. In every
    step its nodes get the tokens of their level and rank. Nothing is random, so the
    trees have no ``draws``, and nothing depends on the sampling parameters. A node
    claims the product that it was chosen for.
    """

    reads_sampling = False
    draws_on_device = True

    def __init__(
        self, num_drafts: int, rank_accuracies: Sequence[Sequence[float]]
    ) -> None:
        """Grow the tree.

        Args:
            num_drafts: draft nodes at most; fewer where no further path was ever
                right.
            rank_accuracies: by level and rank.

        Raises:
            ValueError: when the accuracies give no tree.

        """
        paths = grow_tree(num_drafts, rank_accuracies)
        if not paths:
            raise ValueError(
                "rank_accuracies of the Medusa head are missing or all 0; train it "
                "again (`treespec train medusa`): its evaluation measures them"
            )
        numbers = {path: node for node, path in enumerate([(), *paths])}
        self.sizes = sizes_of_tree(paths)
        depth = self.sizes.max_depth
        # how many ranks of each level the tree uses
        self.num_ranks = [
            1 + max(path[-1] for path in paths if len(path) == level)
            for level in range(1, depth + 1)
        ]
        starts = [sum(self.num_ranks[:level]) for level in range(depth)]
        self.guesses = torch.tensor([starts[len(p) - 1] + p[-1] for p in paths])
        self.parents = torch.tensor([NO_NODE] + [numbers[p[:-1]] for p in paths])
        self.depths = torch.tensor([0] + [len(p) for p in paths])
        self.claims = claims_of_tree(paths, rank_accuracies)

    def propose(self, inputs: ProposerInputs) -> Draft:
        """Fill the tree for every request."""
        (draft_model,) = inputs.draft_models
        num_reqs, device = inputs.root_token_ids.shape[0], inputs.root_token_ids.device
        roots = inputs.root_token_ids[:, None]
        no_parents = torch.zeros_like(roots)
        logits = draft_model.root_logits()[:, None]
        guesses: list[Tensor] = []
        for level, count in enumerate(self.num_ranks):
            if level:
                # The heads look at no drafted token: one node stands for the level.
                logits = draft_model.extend(guesses[-1][:, :1], no_parents)
            columns = logits[:, 0].topk(count, dim=-1).indices
            guesses.append(tokens_of(columns, draft_model.vocabulary))
        # Moved once; no-ops from then on.
        self.guesses = self.guesses.to(device)
        self.parents, self.depths = self.parents.to(device), self.depths.to(device)
        self.claims = self.claims.to(device)
        drafts = torch.cat(guesses, dim=1)[:, self.guesses]
        tree = TreeBatch(
            token_ids=torch.cat([roots, drafts], dim=1),
            parents=self.parents.repeat(num_reqs, 1),
            depths=self.depths.repeat(num_reqs, 1),
            num_nodes=torch.full((num_reqs,), self.sizes.max_nodes, device=device),
        )
        return Draft(tree, self.claims.repeat(num_reqs, 1), len(self.num_ranks))


def grow_tree(
    num_drafts: int, rank_accuracies: Sequence[Sequence[float]]
) -> list[RankPath]:
    """Choose the nodes whose paths are the likeliest to be right.

    Args:
        num_drafts: nodes at most.
        rank_accuracies: by level and rank.

    Returns:
        the nodes in level order, children in rank order. Every node's parent is there
        too; among equal products the shorter path, then the lower ranks, come first.

    """

    def children(path: RankPath, product: float) -> list[tuple[float, int, RankPath]]:
        ranks = rank_accuracies[len(path)] if len(path) < len(rank_accuracies) else ()
        return [
            (-product * accuracy, len(path) + 1, (*path, rank))
            for rank, accuracy in enumerate(ranks)
            if product * accuracy > 0
        ]

    frontier = children((), 1.0)
    heapq.heapify(frontier)
    chosen: list[RankPath] = []
    while frontier and len(chosen) < num_drafts:
        loss, _, path = heapq.heappop(frontier)
        chosen.append(path)
        for child in children(path, -loss):
            heapq.heappush(frontier, child)
    return sorted(chosen, key=lambda path: (len(path), path))
