"""Static tree: one shape for all steps, filled with every node's likeliest tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from vllm_treespec.proposers.base import Proposer, ProposerInputs, tokens_of
from vllm_treespec.proposers.medusa import (
    RankPath,
    claims_of_tree,
    grow_tree,
    sizes_of_tree,
)
from vllm_treespec.trees.draft import Draft
from vllm_treespec.trees.sizes import TreeSizes
from vllm_treespec.trees.tree import NO_NODE, TreeBatch

# By level and rank: how often a guess is right when those above it were. Not measured:
# with them the tree of 25 drafts is the one that EAGLE-1 publishes (arXiv 2401.15077,
# "choices.py" of its code), and smaller trees are parts of it.
RANK_ACCURACIES = (
    (0.6, 0.065, 0.053, 0.038),
    (0.384, 0.14, 0.103),
    (0.33, 0.12, 0.08),
    (0.243, 0.12, 0.098),
    (0.423, 0.402),
)


def sizes(top_k: int, depth: int, num_drafts: int) -> TreeSizes:
    """Bounds on the sizes of any static tree within these limits."""
    num_kept = min(num_drafts, sum(top_k**level for level in range(1, depth + 1)))
    return TreeSizes(
        max_nodes=1 + num_kept,
        max_depth=min(depth, num_kept),
        max_width=num_kept,
        max_leaves=num_kept,
        max_siblings=min(top_k, num_kept),
    )


@dataclass(frozen=True)
class StaticLevel:
    """What one level of the tree is made of.

    Attributes:
        read: int64 [num_read], which nodes of the level above have children.
        above: int64 [num_read], their parents within what was read before them.
        guesses: int64 [width], of each node its parent's index in ``read`` times
            ``num_ranks``, plus its rank.
        num_ranks: ranks that the level uses.

    """

    read: Tensor
    above: Tensor
    guesses: Tensor
    num_ranks: int

    def to(self, device: torch.device) -> StaticLevel:
        """Move it; it is itself where it lies there."""
        return StaticLevel(
            read=self.read.to(device),
            above=self.above.to(device),
            guesses=self.guesses.to(device),
            num_ranks=self.num_ranks,
        )


class StaticTree(Proposer):
    """Drafts a tree by rank paths, as EAGLE-1 does (arXiv 2401.15077, section 4.1).

    The tree grows once, like Medusa's, from how often guesses of each level and rank
    are right. In every step its nodes get tokens: the children of a node are the
    likeliest after that node. Nothing is random, so the trees have no ``draws``, and
    nothing depends on the sampling parameters. A node claims the product of the
    accuracies along its path.
    """

    reads_sampling = False
    draws_on_device = True

    name = "static_tree"

    def __init__(
        self,
        top_k: int,
        depth: int,
        num_drafts: int,
        rank_accuracies: Sequence[Sequence[float]] = RANK_ACCURACIES,
    ) -> None:
        """Grow the tree.

        Args:
            top_k: ranks to use at most.
            depth: levels at most.
            num_drafts: draft nodes at most; fewer where the accuracies end.
            rank_accuracies: by level and rank.

        Raises:
            ValueError: when the accuracies give no tree.

        """
        limited = [ranks[:top_k] for ranks in rank_accuracies[:depth]]
        paths = grow_tree(num_drafts, limited)
        if not paths:
            raise ValueError(
                "rank_accuracies of the head are all 0; remove them, or evaluate the "
                "head again"
            )
        self.paths = tuple(paths)
        self.levels = static_levels(paths)
        numbers = {path: node for node, path in enumerate([(), *paths])}
        self.parents = torch.tensor([NO_NODE] + [numbers[p[:-1]] for p in paths])
        self.depths = torch.tensor([0] + [len(p) for p in paths])
        self.claims = claims_of_tree(paths, limited)
        read = [len(level.read) for level in self.levels[1:]]
        self.sizes = replace(
            sizes_of_tree(paths),
            draft_width=max(read, default=0),
            draft_nodes=sum(read),
            max_siblings=max(level.num_ranks for level in self.levels),
            max_parents=1 + sum(read),
        )

    def propose(self, inputs: ProposerInputs) -> Draft:
        """Fill the tree for every request, one draft forward per level."""
        (draft_model,) = inputs.draft_models
        num_reqs, device = inputs.root_token_ids.shape[0], inputs.root_token_ids.device
        # Moved once; no-ops from then on.
        self.levels = [level.to(device) for level in self.levels]
        self.parents, self.depths = self.parents.to(device), self.depths.to(device)
        self.claims = self.claims.to(device)
        tokens = [inputs.root_token_ids[:, None]]
        for depth, level in enumerate(self.levels):
            if depth:
                above = level.above.expand(num_reqs, -1)
                logits = draft_model.extend(tokens[-1][:, level.read], above)
            else:
                logits = draft_model.root_logits()[:, None]
            columns = logits.topk(level.num_ranks, dim=-1).indices
            chosen = columns.flatten(1)[:, level.guesses]
            tokens.append(tokens_of(chosen, draft_model.vocabulary))
        tree = TreeBatch(
            token_ids=torch.cat(tokens, dim=1),
            parents=self.parents.repeat(num_reqs, 1),
            depths=self.depths.repeat(num_reqs, 1),
            num_nodes=torch.full((num_reqs,), self.sizes.max_nodes, device=device),
        )
        return Draft(tree, self.claims.repeat(num_reqs, 1), len(self.levels))


def static_levels(paths: Sequence[RankPath]) -> list[StaticLevel]:
    """Take a tree apart into its levels; ``paths`` are in level order."""
    levels: list[StaticLevel] = []
    above: list[RankPath] = [()]
    # index of every node among those that are read together with it
    place: dict[RankPath, int] = {}
    for depth in range(1, len(paths[-1]) + 1):
        level = [path for path in paths if len(path) == depth]
        inner = {path[:-1] for path in level}
        read = [path for path in above if path in inner]
        parents = [place[path[:-1]] if path else 0 for path in read]
        place = {path: number for number, path in enumerate(read)}
        num_ranks = 1 + max(path[-1] for path in level)
        guesses = [place[path[:-1]] * num_ranks + path[-1] for path in level]
        levels.append(
            StaticLevel(
                read=torch.tensor([above.index(path) for path in read]),
                above=torch.tensor(parents),
                guesses=torch.tensor(guesses),
                num_ranks=num_ranks,
            )
        )
        above = level
    return levels
