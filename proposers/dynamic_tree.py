"""Dynamic tree: the likeliest nodes of all levels, by joint probability."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from vllm_treespec.proposers.base import (
    Proposer,
    ProposerInputs,
    tokens_of,
)
from vllm_treespec.proposers.draft_filter import DraftFilter
from vllm_treespec.sampling.coupling import LIKELIEST, coupled_chances
from vllm_treespec.trees.builders import from_levels, highest
from vllm_treespec.trees.draft import Draft
from vllm_treespec.trees.sizes import TreeSizes


def useful(top_k: int, depth: int, num_drafts: int) -> tuple[int, int]:
    """Width and depth beyond which no candidate can be among the ``num_drafts`` best.

    A node has as many better siblings as its rank, and as many ancestors as its level.
    """
    return min(top_k, num_drafts), min(depth, num_drafts)


def sizes(top_k: int, depth: int, num_drafts: int) -> TreeSizes:
    """Sizes of trees of the ``num_drafts`` best candidates."""
    width, depth = useful(top_k, depth, num_drafts)
    read = width * (depth - 1)
    num_kept = min(num_drafts, width + read * width)
    # Every node has at most ``width`` children, so that so many are inner nodes.
    leaves = num_kept - (num_kept - 1) // width
    return TreeSizes(
        max_nodes=1 + num_kept,
        max_depth=depth,
        max_width=min(leaves, width if depth == 1 else width * width),
        max_leaves=leaves,
        draft_width=width,
        draft_nodes=read,
        max_siblings=width,
        max_parents=min(num_kept, 1 + read),
    )


class DynamicTree(Proposer):
    """Drafts the tree of EAGLE-2 (arXiv 2406.16858, sections 4.1 and 4.2).

    Beyond the paper, candidates of a joint probability below ``min_probability`` are
    left out, for each node of a tree costs a row of the target's forward.

    Expansion: of every level the ``top_k`` nodes of the highest joint probability are
    read, and their ``top_k`` likeliest tokens become candidates. Re-ranking: the
    ``num_drafts`` candidates of the highest joint probability are the tree; among
    equals those nearer to the root. Probabilities are those under the request's
    sampling parameters (a greedy request's at temperature 1). The nodes are no
    samples, so the trees have no ``draws``. A node claims its joint probability.

    A sampled request's likely tokens are those that the target likely draws, given the
    noise of their positions (``coupling.py``; the paper ranks by the probabilities
    alone). Without keys of the noise it is not looked at.
    """

    can_end_early = True
    draws_on_device = True

    def __init__(
        self,
        top_k: int,
        depth: int,
        num_drafts: int,
        min_probability: float | None = 0.0,
    ) -> None:
        """Take nodes read a level (and children of each), levels, and draft nodes.

        Args:
            top_k: children of a node, and nodes of a level that are read.
            depth: levels.
            num_drafts: draft nodes.
            min_probability: joint probability of a node at least.

        """
        self.top_k, self.depth = useful(top_k, depth, num_drafts)
        self.num_drafts = num_drafts
        self.min_probability = min_probability
        self.sizes = self.sizes_of(top_k, depth, num_drafts)

    @staticmethod
    def sizes_of(top_k: int, depth: int, num_drafts: int) -> TreeSizes:
        """Sizes of the trees, see ``__init__``."""
        return sizes(top_k, depth, num_drafts)

    def propose(self, inputs: ProposerInputs) -> Draft:
        """Draft one tree per request, one draft forward per level."""
        (draft_model,) = inputs.draft_models
        vocabulary = draft_model.vocabulary
        logits = draft_model.root_logits()[:, None]
        place = torch.zeros_like(inputs.root_token_ids)[:, None]
        joint = torch.zeros_like(place, dtype=torch.float64)
        filter_ = DraftFilter(self.min_probability, inputs)
        tokens: list[Tensor] = []
        parents: list[Tensor] = []
        log_probs: list[Tensor] = []
        for level in range(self.depth):
            probs = inputs.sampling.probs(logits)
            count = min(self.top_k, probs.shape[-1])
            if inputs.follows_noise:
                chances, columns = following_noise(probs, count, inputs, level)
            else:
                chances, columns = probs.topk(count, dim=-1)
            joints = joint[..., None] + chances.double().log()
            children = inputs.within_levels(filter_.of_drafts(joints), level + 1)
            tokens.append(tokens_of(columns.flatten(1), vocabulary))
            parents.append(place.repeat_interleave(count, dim=1))
            log_probs.append(children.flatten(1))
            if level + 1 == self.depth:
                break
            place = frontier(log_probs[-1], self._num_read(log_probs[-1], inputs))
            joint = log_probs[-1].gather(1, place)
            if filter_.ends(level + 1, joint.exp()):
                break
            read = tokens[-1].gather(1, place)
            logits = draft_model.extend(read, place // count)
        return self.best(inputs, tokens, parents, log_probs)

    def best(
        self,
        inputs: ProposerInputs,
        tokens: Sequence[Tensor],
        parents: Sequence[Tensor],
        log_probs: Sequence[Tensor],
    ) -> Draft:
        """Make the trees of the best candidates of all levels.

        Args:
            inputs: of the step.
            tokens: per level, int64 [num_reqs, width].
            parents: per level, int64 [num_reqs, width], see ``from_levels``.
            log_probs: per level, float64 [num_reqs, width], joint; -inf for what is
                left out.

        """
        values = torch.cat(list(log_probs), dim=1)
        kept = highest(values, self.num_drafts, inputs.max_drafts())
        widths = [level.shape[1] for level in tokens]
        draft = from_levels(
            inputs.root_token_ids,
            tokens,
            parents,
            kept.split(widths, dim=1),
            draft_probs=None,
            max_nodes=1 + self.num_drafts,
            claims=values.exp().split(widths, dim=1),
        )
        return replace(draft, levels=len(tokens))

    def _num_read(self, values: Tensor, inputs: ProposerInputs) -> int:
        """Nodes of a level that are read of each tree: no more than any tree has."""
        if not inputs.can_sync:
            return self.top_k
        num_found = (values > -torch.inf).sum(1).max()
        return min(max(int(num_found), 1), self.top_k)


def following_noise(
    probs: Tensor, count: int, inputs: ProposerInputs, level: int
) -> tuple[Tensor, Tensor]:
    """The tokens that are likeliest drawn by the target, given its noise.

    Args:
        probs: float32 [num_reqs, width, draft_vocab_size], after each node.
        count: how many to find after each.
        inputs: of the step. Greedy requests' tokens are those of the highest ``probs``.
        level: of the nodes, from 0.

    Returns:
        how likely each is drawn, float64, and its column, int64, both [num_reqs, width,
        count], the likeliest first.

    """
    (draft_model,) = inputs.draft_models
    assert inputs.noise_keys is not None
    mass, columns = probs.topk(min(max(count, LIKELIEST), probs.shape[-1]), dim=-1)
    tokens = tokens_of(columns, draft_model.vocabulary)
    keys = inputs.noise_keys[:, level, None, None]
    best = drawn_chances(mass, tokens, keys, inputs).topk(count, dim=-1)
    return best.values, columns.gather(-1, best.indices)


def drawn_chances(
    mass: Tensor, tokens: Tensor, keys: Tensor, inputs: ProposerInputs
) -> Tensor:
    """How likely the target draws each token, given its noise; a greedy one's mass.

    Args:
        mass: [num_reqs, ..., count], probabilities of likely tokens.
        tokens: int64, such tokens; broadcast to ``mass``.
        keys: int64, of the noise at their positions; broadcast to ``tokens``.
        inputs: of the step.

    Returns:
        float64, of the shape of ``mass``.

    """
    chances = coupled_chances(inputs.noise_of(keys, tokens), mass)
    greedy = inputs.sampling.greedy.view(-1, *[1] * (mass.dim() - 1))
    return torch.where(greedy, mass.double(), chances)


def frontier(values: Tensor, top_k: int) -> Tensor:
    """Places of a level's best candidates, ascending.

    Args:
        values: [num_reqs, width], what ranks them.
        top_k: how many to find; all when there are fewer.

    Returns:
        int64 [num_reqs, at most top_k]; among equals the earlier ones.

    """
    best = values.sort(dim=1, descending=True, stable=True).indices[:, :top_k]
    return best.sort(dim=1).values
