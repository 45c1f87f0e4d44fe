"""Suffix: a tree of what followed earlier occurrences of the last tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from vllm_treespec.host_copies import on_device
from vllm_treespec.proposers.base import Proposer, ProposerInputs
from vllm_treespec.schedule.plan import StepPlan
from vllm_treespec.sources.continuations import (
    Continuation,
    Continuations,
    next_tokens,
)
from vllm_treespec.trees.draft import NO_TOKEN, Draft, ShadowDrafts
from vllm_treespec.trees.sizes import TreeSizes
from vllm_treespec.trees.source import Source
from vllm_treespec.trees.tree import NO_NODE, TreeBatch

# Leaves of a tree at most. Where every path is a sequence of its own, KV memory is
# reserved for as many; larger trees gain by depth.
MAX_LEAVES = 16


def sizes(num_drafts: int, depth: int) -> TreeSizes:
    """Sizes of trees of at most ``num_drafts`` draft tokens in ``depth`` levels."""
    leaves = min(num_drafts, MAX_LEAVES)
    return TreeSizes(
        max_nodes=1 + num_drafts,
        max_depth=min(depth, num_drafts),
        max_width=leaves,
        max_leaves=leaves,
    )


@dataclass(frozen=True)
class GrownTrees:
    """Trees on the host; see ``TreeBatch`` and ``Draft``."""

    # int64 [num_reqs, max_nodes], without the roots' tokens
    token_ids: np.ndarray
    # int64 [num_reqs, max_nodes]
    parents: np.ndarray
    depths: np.ndarray
    # int64 [num_reqs], roots included
    num_nodes: np.ndarray
    # float64 [num_reqs, max_nodes]
    claims: np.ndarray

    def num_leaves(self) -> np.ndarray:
        """Leaves among each tree's drafts, int64 [num_reqs]."""
        sizes = self.num_nodes.tolist()
        inner = [
            len({0, *row[1:size]})
            for row, size in zip(self.parents.tolist(), sizes, strict=True)
        ]
        return self.num_nodes - np.array(inner)

    def draft(self, root_token_ids: Tensor) -> Draft:
        """Bring the trees to the device of their roots, int64 [num_reqs]; one copy."""
        host = np.hstack(
            [
                self.token_ids,
                self.parents,
                self.depths,
                self.claims.view(np.int64),
                self.num_nodes[:, None],
            ]
        )
        numbers = on_device(host, root_token_ids.device)
        width = self.token_ids.shape[1]
        token_ids, parents, depths, claims, num_nodes = numbers.split(
            [width] * 4 + [1], dim=1
        )
        token_ids[:, 0] = root_token_ids
        tree = TreeBatch(token_ids, parents, depths, num_nodes[:, 0])
        return Draft(tree, claims.view(torch.float64))


class DraftNode(NamedTuple):
    """A draft node of a tree."""

    token: int
    # node number, 0 is the root
    parent: int
    depth: int
    # of its path
    probability: float


class Suffix(Proposer):
    """Drafts what a ``SuffixIndex`` found (after arXiv 2411.04975).

    The tree has the nodes that are most likely accepted, and none that is less likely
    than ``min_probability``, or than the step's plan says; without both, than
    ``UNPRICED``. Without an occurrence it is the root alone. Nothing is random. A node
    claims the probability of its path.
    """

    def __init__(
        self, num_drafts: int, depth: int, min_probability: float | None = None
    ) -> None:
        """Take the tree's limits."""
        self.num_drafts = num_drafts
        self.min_probability = min_probability
        self.sizes = sizes(num_drafts, depth)

    def propose(self, inputs: ProposerInputs) -> Draft:
        """Grow one tree per request from its continuations; ``draws`` is None."""
        (found,) = inputs.continuations
        limits = [(self.num_drafts, MAX_LEAVES)] * len(found.by_request)
        least = inputs.min_claims(Source.INDEX, self.min_probability)
        trees = self.grow(found, limits, least)
        if not inputs.plan.prunes:
            return self.grown(trees).draft(inputs.root_token_ids)
        trees = within_rows(trees, inputs.plan)
        grown = self.grown(worth_most(trees, inputs.plan))
        shadow = self._shadow(found, grown.num_nodes, inputs.root_token_ids.device)
        return replace(grown.draft(inputs.root_token_ids), shadow=shadow)

    def _shadow(
        self, found: Continuations, num_nodes: np.ndarray, device: torch.device
    ) -> ShadowDrafts:
        """The likeliest token where no draft is worth its row; one copy.

        So claims are compared with what was accepted also while drafts do not pay.

        Args:
            found: of each request.
            num_nodes: int64 [num_reqs], of the trees.
            device: of the result.

        """
        tokens = np.full(len(num_nodes), NO_TOKEN)
        claims = np.zeros(len(num_nodes))
        for row in np.flatnonzero(num_nodes == 1).tolist():
            share, token = found.likeliest[row]
            if share >= (self.min_probability or 0.0):
                tokens[row], claims[row] = token, share
        host = np.stack([tokens, claims.view(np.int64)])
        token_ids, bits = on_device(host, device)
        return ShadowDrafts(token_ids, bits.view(torch.float64))

    def index_hits(self, plan: StepPlan, found: Continuations) -> Sequence[float]:
        """How likely each request's next token is one that is drafted, and right."""
        kept = plan.kept[Source.INDEX]
        least = plan.min_claim(Source.INDEX, self.min_probability or 0.0)
        return [
            min(share * ratio, 1.0) if share >= lowest else 0.0
            for (share, _), lowest, ratio in zip(
                found.likeliest, least, kept, strict=True
            )
        ]

    def grow(
        self,
        found: Continuations,
        limits: Sequence[tuple[int, int]],
        least: Sequence[float],
    ) -> list[list[DraftNode]]:
        """Grow one tree per request on the host.

        Args:
            found: of each request.
            limits: draft nodes, and leaves, that each tree may have.
            least: probability that a node of each tree has at least.

        """
        max_depth = self.sizes.max_depth
        trees: list[list[DraftNode]] = []
        for row, continuations in enumerate(found.by_request):
            if found.likeliest[row][0] < least[row]:
                trees.append([])
                continue
            near = [(length, rest[:max_depth]) for length, rest in continuations]
            trees.append(grow_tree(near, *limits[row], least[row]))
        return trees

    def grown(self, trees: Sequence[Sequence[DraftNode]]) -> GrownTrees:
        """Put trees into arrays."""
        shape = (len(trees), self.sizes.max_nodes)
        tokens = np.zeros(shape, dtype=np.int64)
        parents = np.full(shape, NO_NODE, dtype=np.int64)
        depths = np.zeros(shape, dtype=np.int64)
        num_nodes = np.ones(len(tokens), dtype=np.int64)
        claims = np.zeros(shape)
        for row, tree in enumerate(trees):
            num_nodes[row] = size = 1 + len(tree)
            if tree:
                drafts = list(zip(*tree, strict=True))
                tokens[row, 1:size] = drafts[0]
                parents[row, 1:size] = drafts[1]
                depths[row, 1:size] = drafts[2]
                claims[row, 1:size] = drafts[3]
        return GrownTrees(tokens, parents, depths, num_nodes, claims)


def within_rows(trees: list[list[DraftNode]], plan: StepPlan) -> list[list[DraftNode]]:
    """These trees, cut to the rows of a step: their likeliest nodes stay.

    A node is no likelier than its parent, which thus stays, too.
    """
    if plan.max_rows is None or sum(map(len, trees)) <= plan.max_rows:
        return trees
    ranked = sorted(
        (-ratio * draft.probability, node, row)
        for row, (tree, ratio) in enumerate(
            zip(trees, plan.kept[Source.INDEX], strict=True)
        )
        for node, draft in enumerate(tree, start=1)
    )
    staying: list[list[int]] = [[] for _ in trees]
    for _, node, row in ranked[: plan.max_rows]:
        staying[row].append(node)
    return [
        subtree(tree, sorted(nodes)) for tree, nodes in zip(trees, staying, strict=True)
    ]


def subtree(tree: Sequence[DraftNode], nodes: Sequence[int]) -> list[DraftNode]:
    """Some nodes of a tree, ascending, and with each its parent."""
    number = {0: 0} | {node: new for new, node in enumerate(nodes, start=1)}
    drafts = [tree[node - 1] for node in nodes]
    return [draft._replace(parent=number[draft.parent]) for draft in drafts]


def worth_most(
    trees: Sequence[Sequence[DraftNode]], plan: StepPlan
) -> Sequence[Sequence[DraftNode]]:
    """These trees, their likeliest paths, or nothing: what brings most after its cost.

    Trees that are no chains cost a step something besides. So do any drafts.
    """
    nothing: list[list[DraftNode]] = [[] for _ in trees]
    branches = any(map(has_branches, trees))
    paths = [likeliest_path(tree) for tree in trees] if branches else trees
    offers: list[tuple[Sequence[Sequence[DraftNode]], bool]] = [
        (nothing, False),
        (paths, False),
    ]
    if branches:
        offers.append((trees, True))
    best, _ = max(offers, key=lambda offer: gain_of(offer[0], offer[1], plan))
    return best


def gain_of(
    trees: Sequence[Sequence[DraftNode]], branches: bool, plan: StepPlan
) -> float:
    """Accepted tokens that a step's trees likely bring, less what they cost.

    Args:
        trees: of all requests.
        branches: whether one of them is no chain.
        plan: of the step.

    """
    num_drafts = sum(map(len, trees))
    if not num_drafts:
        return 0.0
    accepted = sum(
        ratio * draft.probability
        for tree, ratio in zip(trees, plan.kept[Source.INDEX], strict=True)
        for draft in tree
    )
    fixed = plan.fixed_cost + branches * plan.branch_cost
    return accepted - num_drafts * plan.row_cost - fixed


def has_branches(tree: Sequence[DraftNode]) -> bool:
    """Whether a tree is no chain; its nodes are in level order."""
    return any(draft.parent != number for number, draft in enumerate(tree))


def likeliest_path(tree: Sequence[DraftNode]) -> list[DraftNode]:
    """The likeliest child of the root, its likeliest child, and so on, as a tree."""
    path: list[DraftNode] = []
    last = 0
    for node, draft in enumerate(tree, start=1):
        if draft.parent == last:
            path.append(draft._replace(parent=len(path)))
            last = node
    return path


def grow_tree(
    continuations: Sequence[Continuation],
    num_drafts: int,
    max_leaves: int,
    min_probability: float,
) -> list[DraftNode]:
    """Merge continuations into a tree of the nodes that are most likely accepted.

    Where it has as many leaves as it may, the likeliest nodes below leaves follow.

    Args:
        continuations: pairs of the length of a match and the tokens after it, longest
            matches first.
        num_drafts: nodes at most.
        max_leaves: at most, 1 or more.
        min_probability: of each node's path, at least.

    Returns:
        the draft nodes in level order, siblings side by side and the likeliest first.

    """
    # of node 0, the root, and then of the drafts, the likeliest first
    tokens, depths, probabilities = [0], [0], [1.0]
    children: list[list[int]] = [[]]
    # improbability, number in order of discovery, parent, token, continuations
    waiting: list[tuple[float, int, int, int, list[Continuation]]] = []
    num_found, num_leaves = 0, 1
    probability, node, shared = 1.0, 0, list(continuations)
    while len(tokens) <= num_drafts:
        for token, (share, same) in next_tokens(shared, depths[node]).items():
            if probability * share >= min_probability:
                num_found += 1
                entry = (-probability * share, num_found, node, token, same)
                heappush(waiting, entry)
        while waiting and num_leaves == max_leaves and children[waiting[0][2]]:
            heappop(waiting)
        if not waiting:
            break
        improbability, _, parent, token, shared = heappop(waiting)
        num_leaves += bool(children[parent])
        probability, node = -improbability, len(tokens)
        tokens.append(token)
        depths.append(depths[parent] + 1)
        probabilities.append(probability)
        children.append([])
        children[parent].append(node)
    drafts: list[DraftNode] = []
    level_order = [0]
    for index, node in enumerate(level_order):
        level_order += children[node]
        drafts += [
            DraftNode(tokens[child], index, depths[child], probabilities[child])
            for child in children[node]
        ]
    return drafts
