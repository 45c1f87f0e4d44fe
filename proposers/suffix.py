"""Suffix: a tree of what followed earlier occurrences of the last tokens."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush

import numpy as np

from vllm_treespec.proposers.base import Proposer, ProposerInputs
from vllm_treespec.schedule.plan import StepPlan
from vllm_treespec.sources.continuations import (
    Continuation,
    Continuations,
    next_tokens,
)
from vllm_treespec.trees.draft import NO_TOKEN, Draft
from vllm_treespec.trees.host_trees import DraftNode, DraftNodes, draft_of, subtree
from vllm_treespec.trees.sizes import TreeSizes
from vllm_treespec.trees.source import Source

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


class Suffix(Proposer):
    """Drafts what a ``SuffixIndex`` found (after arXiv 2411.04975).

    The tree has the nodes that are most likely accepted, and none that is less likely
    than ``min_probability``, or than the step's plan says; without both, than
    ``UNPRICED``. Without an occurrence it is the root alone. Nothing is random. A node
    claims the probability of its path.
    """

    def __init__(
        self,
        num_drafts: int,
        depth: int,
        min_probability: float | None = None,
        source: int = 0,
    ) -> None:
        """Take the tree's limits, and what its nodes have as their source."""
        self.num_drafts = num_drafts
        self.min_probability = min_probability
        self.source = source
        self.sizes = sizes(num_drafts, depth)

    def propose(self, inputs: ProposerInputs) -> Draft:
        """Grow one tree per request from its continuations; ``draws`` is None."""
        (found,) = inputs.continuations
        limits = [(self.num_drafts, MAX_LEAVES)] * len(found.by_request)
        least = inputs.min_claims(Source.INDEX, self.min_probability)
        trees: Sequence[DraftNodes] = self.grow(found, limits, least)
        shadow = None
        if inputs.plan.prunes:
            trees = worth_most(within_rows(trees, inputs.plan), inputs.plan)
            shadow = self._shadow(found, trees)
        return draft_of(
            trees, inputs.root_token_ids, self.sizes.max_nodes, shadow=shadow
        )

    def _shadow(
        self, found: Continuations, trees: Sequence[DraftNodes]
    ) -> tuple[np.ndarray, np.ndarray]:
        """The likeliest token where no draft is worth its row, see ``HostDraft``.

        So claims are compared with what was accepted also while drafts do not pay.
        """
        tokens = np.full(len(trees), NO_TOKEN)
        claims = np.zeros(len(trees))
        for row, tree in enumerate(trees):
            share, token = found.likeliest[row]
            if not tree and share >= (self.min_probability or 0.0):
                tokens[row], claims[row] = token, share
        return tokens, claims

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
            trees.append(grow_tree(near, *limits[row], least[row], self.source))
        return trees


def within_rows(trees: Sequence[DraftNodes], plan: StepPlan) -> Sequence[DraftNodes]:
    """These trees, cut to the rows of a step: their likeliest nodes stay.

    A node is no likelier than its parent, which thus stays, too.
    """
    if plan.max_rows is None or sum(map(len, trees)) <= plan.max_rows:
        return trees
    ranked = sorted(
        (-ratio * draft.claim, node, row)
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


def worth_most(trees: Sequence[DraftNodes], plan: StepPlan) -> Sequence[DraftNodes]:
    """These trees, their likeliest paths, or nothing: what brings most after its cost.

    Trees that are no chains cost a step something besides. So do any drafts.
    """
    nothing: list[DraftNodes] = [[] for _ in trees]
    branches = any(map(has_branches, trees))
    paths = [likeliest_path(tree) for tree in trees] if branches else trees
    offers: list[tuple[Sequence[DraftNodes], bool]] = [
        (nothing, False),
        (paths, False),
    ]
    if branches:
        offers.append((trees, True))
    best, _ = max(offers, key=lambda offer: gain_of(offer[0], offer[1], plan))
    return best


def gain_of(trees: Sequence[DraftNodes], branches: bool, plan: StepPlan) -> float:
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
        ratio * draft.claim
        for tree, ratio in zip(trees, plan.kept[Source.INDEX], strict=True)
        for draft in tree
    )
    fixed = plan.fixed_cost + branches * plan.branch_cost
    return accepted - num_drafts * plan.row_cost - fixed


def has_branches(tree: DraftNodes) -> bool:
    """Whether a tree is no chain; its nodes are in level order."""
    return any(draft.parent != number for number, draft in enumerate(tree))


def likeliest_path(tree: DraftNodes) -> list[DraftNode]:
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
    source: int = 0,
) -> list[DraftNode]:
    """Merge continuations into a tree of the nodes that are most likely accepted.

    Where it has as many leaves as it may, the likeliest nodes below leaves follow.

    Args:
        continuations: pairs of the length of a match and the tokens after it, longest
            matches first.
        num_drafts: nodes at most.
        max_leaves: at most, 1 or more.
        min_probability: of each node's path, at least.
        source: of the nodes.

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
            DraftNode(tokens[child], index, depths[child], probabilities[child], source)
            for child in children[node]
        ]
    return drafts
