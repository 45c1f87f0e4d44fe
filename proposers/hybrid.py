"""Hybrid: what a suffix index found, and a model's likeliest tokens, in one tree."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from vllm_treespec.proposers import dynamic_tree, suffix
from vllm_treespec.proposers.base import Proposer, ProposerInputs
from vllm_treespec.schedule.prices import Prices
from vllm_treespec.sources.continuations import Continuations
from vllm_treespec.trees.builders import merge_drafts
from vllm_treespec.trees.draft import Draft
from vllm_treespec.trees.sizes import TreeSizes
from vllm_treespec.trees.source import Source


def sizes(num_drafts: int, depth: int, top_k: int, model_depth: int) -> TreeSizes:
    """Sizes of trees of at most ``num_drafts`` draft tokens of both parts."""
    found = suffix.sizes(num_drafts, depth)
    if not model_depth:
        return replace(found, draft_depth=1, draft_width=1, draft_nodes=1)
    drafted = dynamic_tree.sizes(top_k, model_depth, found.max_leaves)
    return replace(
        found,
        max_depth=max(found.max_depth, drafted.max_depth),
        draft_depth=drafted.max_depth,
        draft_width=drafted.draft_width,
        draft_nodes=drafted.draft_nodes,
        max_parents=num_drafts,
    )


class Hybrid(Proposer):
    """Drafts a suffix tree and a dynamic tree as one; equal paths are one.

    The index's part comes first: it gets its share of the draft tokens, and takes as
    many of them as it found continuations. The model's part gets the others. Tokens of
    both parts leave places empty. Where the index has the whole share, or no draft
    model is there, the model drafts nothing. Nothing is random. A node that both found
    has the index's claim.
    """

    def __init__(
        self,
        num_drafts: int,
        depth: int,
        top_k: int,
        model_depth: int,
        min_probability: float | None = None,
    ) -> None:
        """Take the draft tokens of the whole tree, and the limits of its parts."""
        self.num_drafts = num_drafts
        self.index = suffix.Suffix(num_drafts, depth, min_probability)
        self.model: dynamic_tree.DynamicTree | None = None
        if model_depth:
            self.model = dynamic_tree.DynamicTree(
                top_k, model_depth, self.index.sizes.max_leaves, min_probability
            )
        self.num_draft_models = 0 if self.model is None else 1
        self.sizes = sizes(num_drafts, depth, top_k, model_depth)

    def needs_model(
        self,
        continuations: Continuations,
        first_shares: np.ndarray,
        prices: Prices | None,
    ) -> bool:
        """Whether the model is worth asking beside what the index found.

        Args:
            continuations: of the requests that draft.
            first_shares: float64 [num_reqs], see ``Shares.first``.
            prices: of the step; None: it is asked where the index is not sure.

        """
        unsure = first_shares < 1
        if prices is None:
            return bool(unsure.any())
        found = self.index.likely_found(continuations, prices)
        gains = [
            added * (1 - elsewhere) * asked
            for added, elsewhere, asked in zip(
                prices.added, found, unsure.tolist(), strict=True
            )
        ]
        return sum(gains) > prices.level

    def propose(self, inputs: ProposerInputs) -> Draft:
        """Draft one tree per request; ``draws`` is None."""
        if self.model is None or not inputs.draft_models:
            draft = self.index.propose(inputs)
            return replace(draft, sources=(draft.tree.depths > 0) * Source.INDEX)
        (continuations,) = inputs.continuations
        assert inputs.first_shares is not None
        least = inputs.least(self.index.min_probability)
        limits = self._limits(inputs.first_shares)
        grown = self.index.grown(self.index.grow(continuations, limits, least))
        # A draft adds one leaf at most.
        left = np.minimum(
            1 + self.num_drafts - grown.num_nodes,
            self.sizes.max_leaves - grown.num_leaves(),
        )
        left[inputs.first_shares == 1] = 0
        roots = inputs.root_token_ids
        num_drafts = torch.from_numpy(left).to(roots.device)
        of_model = replace(inputs, num_drafts=num_drafts)
        if inputs.prices is not None:
            of_model = replace(
                of_model,
                prices=inputs.prices.of_model(),
                found=self.index.likely_found(continuations, inputs.prices),
            )
        drafted = self.model.propose(of_model)
        return merge_drafts(
            grown.draft(roots),
            drafted,
            (Source.INDEX, Source.MODEL),
            drafted.levels,
            1 + self.num_drafts,
        )

    def _limits(self, shares: np.ndarray) -> list[tuple[int, int]]:
        """Draft tokens, and leaves, of the index's part: all, or at least one less."""
        limits = []
        for total in (self.num_drafts, self.sizes.max_leaves):
            places = np.rint(shares * total).clip(1, max(total - 1, 1))
            places[shares == 1] = total
            limits.append([int(count) for count in places])
        return list(zip(*limits, strict=True))
