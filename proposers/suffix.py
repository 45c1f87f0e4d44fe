"""Suffix: a tree of what followed earlier occurrences of the last tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from vllm_treespec.core.sizes import TreeSizes
from vllm_treespec.core.tree import NO_NODE, TreeBatch
from vllm_treespec.proposers.base import Proposer, ProposerInputs, register_proposer
from vllm_treespec.sources.base import Continuation, Continuations


def sizes(num_drafts: int, depth: int, max_match: int) -> TreeSizes:
    """Sizes of trees of at most ``num_drafts`` draft tokens in ``depth`` levels.

    No level is deeper than the longest match, ``max_match`` tokens.
    """
    return TreeSizes(
        max_nodes=1 + num_drafts,
        max_depth=min(depth, num_drafts, max_match),
        max_width=num_drafts,
        max_leaves=num_drafts,
    )


@dataclass(frozen=True)
class GrownTrees:
    """Trees on the host; see ``TreeBatch``."""

    # int64 [num_reqs, max_nodes], without the roots' tokens
    token_ids: np.ndarray
    # int64 [num_reqs, max_nodes]
    parents: np.ndarray
    depths: np.ndarray
    # int64 [num_reqs], roots included
    num_nodes: np.ndarray

    def tree(self, root_token_ids: Tensor) -> TreeBatch:
        """Bring the trees to the device of their roots, int64 [num_reqs]."""
        device = root_token_ids.device
        token_ids = torch.from_numpy(self.token_ids).to(device)
        token_ids[:, 0] = root_token_ids
        return TreeBatch(
            token_ids=token_ids,
            parents=torch.from_numpy(self.parents).to(device),
            depths=torch.from_numpy(self.depths).to(device),
            num_nodes=torch.from_numpy(self.num_nodes).to(device),
        )


@register_proposer("suffix_tree")
class Suffix(Proposer):
    """Drafts what a ``SuffixIndex`` found (after arXiv 2411.04975).

    Nodes of longer occurrences come first, then those of more frequent ones. Without
    an occurrence the tree is the root alone. Nothing is random, and nothing depends on
    the sampling parameters.
    """

    num_draft_models = 0

    def __init__(self, num_drafts: int, depth: int, max_match: int) -> None:
        """Take the tree's limits, and the longest match of the index."""
        self.num_drafts = num_drafts
        self.sizes = sizes(num_drafts, depth, max_match)

    def propose(self, inputs: ProposerInputs) -> TreeBatch:
        """Grow one tree per request from its continuations; ``draws`` is None."""
        (found,) = inputs.continuations
        limits = [self.num_drafts] * len(found.by_request)
        return self.grow(found, limits).tree(inputs.root_token_ids)

    def grow(self, found: Continuations, limits: Sequence[int]) -> GrownTrees:
        """Grow one tree per request on the host.

        Args:
            found: of each request.
            limits: draft nodes that each tree may have.

        """
        max_depth = self.sizes.max_depth
        shape = (len(found.by_request), self.sizes.max_nodes)
        tokens = np.zeros(shape, dtype=np.int64)
        parents = np.full(shape, NO_NODE, dtype=np.int64)
        depths = np.zeros(shape, dtype=np.int64)
        num_nodes = np.ones(len(tokens), dtype=np.int64)
        for row, continuations in enumerate(found.by_request):
            near = [(length, rest[:max_depth]) for length, rest in continuations]
            tree = grow_tree(near, limits[row])
            num_nodes[row] = size = 1 + len(tree)
            if tree:
                drafts = np.array(tree)
                tokens[row, 1:size] = drafts[:, 0]
                parents[row, 1:size] = drafts[:, 1]
                depths[row, 1:size] = drafts[:, 2]
        return GrownTrees(tokens, parents, depths, num_nodes)


def grow_tree(
    continuations: Sequence[Continuation], num_drafts: int
) -> list[tuple[int, int, int]]:
    """Merge continuations into a tree and keep its best nodes.

    Args:
        continuations: pairs of the length of a match and the tokens after it, longest
            matches first.
        num_drafts: nodes to keep at most.

    Returns:
        token, parent and depth of each draft node in level order, siblings side by
        side and the best first.

    """
    number: dict[tuple[int, int], int] = {}
    # of node 0, the root, and then of the drafts in the order in which they came up
    parents, tokens, depths, longest, counts = [0], [0], [0], [0], [0]
    for length, rest in continuations:
        parent = 0
        for depth, token in enumerate(rest, start=1):
            node = number.setdefault((parent, token), len(tokens))
            if node == len(tokens):
                parents.append(parent)
                tokens.append(token)
                depths.append(depth)
                longest.append(length)
                counts.append(0)
            counts[node] += length == longest[node]
            parent = node
    # No node ranks before its parent, so any number of the first ones is a tree.
    ranked = sorted(
        range(1, len(tokens)), key=lambda i: (-longest[i], -counts[i], depths[i])
    )
    children: dict[int, list[int]] = {}
    for node in ranked[:num_drafts]:
        children.setdefault(parents[node], []).append(node)
    drafts: list[tuple[int, int, int]] = []
    level_order = [0]
    for index, node in enumerate(level_order):
        for child in children.get(node, ()):
            level_order.append(child)
            drafts.append((tokens[child], index, depths[child]))
    return drafts
