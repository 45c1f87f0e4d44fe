"""Hybrid: what a suffix index found, and a model's likeliest tokens, in one tree."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from vllm_treespec.proposers import dflash, dynamic_tree, suffix
from vllm_treespec.proposers.base import Proposer, ProposerInputs
from vllm_treespec.schedule.plan import StepPlan
from vllm_treespec.sources.continuations import Continuations
from vllm_treespec.trees.draft import Draft
from vllm_treespec.trees.host_trees import DraftNodes, merge_drafts, num_leaves
from vllm_treespec.trees.sizes import TreeSizes
from vllm_treespec.trees.source import Source


def sizes(
    num_drafts: int, depth: int, top_k: int, model_depth: int, one_pass: bool = False
) -> TreeSizes:
    """Sizes of trees of at most ``num_drafts`` draft tokens of both parts."""
    found = suffix.sizes(num_drafts, depth)
    if not model_depth:
        return replace(found, draft_depth=1, draft_width=1, draft_nodes=1)
    drafted = dynamic_tree.sizes(top_k, model_depth, found.max_leaves)
    if one_pass:
        drafted = dflash.sizes(drafted)
    return replace(
        found,
        max_depth=max(found.max_depth, drafted.max_depth),
        draft_depth=drafted.max_depth,
        draft_forwards=drafted.draft_forwards,
        draft_width=drafted.draft_width,
        draft_nodes=drafted.draft_nodes,
        max_parents=num_drafts,
    )


def index_rows(max_rows: int, model_depth: int, num_reqs: int) -> int:
    """Rows of a step that an index takes at most beside a model.

    A path of the model has places for each request, but in one half of the rows; one
    draft of the model always has.
    """
    of_index = max(max_rows - model_depth * num_reqs, max_rows // 2)
    return max(min(of_index, max_rows - num_reqs), 0)


class Hybrid(Proposer):
    """Drafts a suffix tree and a dynamic tree as one; equal paths are one.

    The index's part comes first: it takes as many places as it found continuations that
    claim enough. The best nodes that the model alone found get the others. Nothing is
    random. A node that both found has the index's claim.
    """

    def __init__(
        self,
        num_drafts: int,
        depth: int,
        top_k: int,
        model_depth: int,
        min_probability: float | None = None,
        one_pass: bool = False,
    ) -> None:
        """Take the draft tokens of the whole tree, and the limits of its parts.

        Args:
            num_drafts: of both parts.
            depth: levels of the index's part.
            top_k: of the model's part, see ``DynamicTree``.
            model_depth: levels of the model's part; 0: there is none.
            min_probability: of a draft at least.
            one_pass: whether one forward of the model drafts all levels.

        """
        self.num_drafts = num_drafts
        self.index = suffix.Suffix(num_drafts, depth, min_probability, Source.INDEX)
        self.model: dynamic_tree.DynamicTree | None = None
        if model_depth:
            grow = dflash.DFlash if one_pass else dynamic_tree.DynamicTree
            self.model = grow(
                top_k, model_depth, self.index.sizes.max_leaves, min_probability
            )
        self.sizes = sizes(num_drafts, depth, top_k, model_depth, one_pass)

    @property
    def graph_part(self) -> dynamic_tree.DynamicTree | None:
        """The model's part."""
        return self.model

    def index_hits(self, plan: StepPlan, found: Continuations) -> Sequence[float]:
        """How likely the index drafts each request's next token."""
        return self.index.index_hits(plan, found)

    def propose(self, inputs: ProposerInputs) -> Draft:
        """Draft one tree per request; ``draws`` is None."""
        if self.model is None or not inputs.draft_models:
            return self.index.propose(inputs)
        (continuations,) = inputs.continuations
        least = inputs.min_claims(Source.INDEX, self.index.min_probability)
        limits = [self._index_limits(inputs.plan)] * len(continuations.by_request)
        found: Sequence[DraftNodes] = self.index.grow(continuations, limits, least)
        max_rows, left_over = inputs.plan.max_rows, self.num_drafts
        if max_rows is not None:
            depth = self.model.sizes.max_depth
            most = index_rows(max_rows, depth, len(found))
            found = suffix.within_rows(found, replace(inputs.plan, max_rows=most))
            left_over = (max_rows - sum(map(len, found))) // len(found)
        # A draft adds one leaf at most.
        left = [
            min(
                self.num_drafts - len(tree),
                self.sizes.max_leaves - num_leaves(tree),
                left_over,
            )
            for tree in found
        ]
        drafted = inputs.unseen_part
        if drafted is None:
            drafted = inputs.draw(self.model)
        return merge_drafts(found, drafted, Source.MODEL, left, 1 + self.num_drafts)

    def _index_limits(self, plan: StepPlan) -> tuple[int, int]:
        """Draft tokens, and leaves, of the index's part beside a model.

        Where drafts are pruned their claims hand out the places, but for those of one
        path of the model. Else each part has one half.
        """
        assert self.model is not None
        if not plan.prunes:
            halves = self.num_drafts // 2, self.sizes.max_leaves // 2
            return max(halves[0], 1), max(halves[1], 1)
        depth = self.model.sizes.max_depth
        places = self.num_drafts - depth, self.sizes.max_leaves - 1
        return max(places[0], 1), max(places[1], 1)
