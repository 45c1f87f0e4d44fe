"""DFlash: trees over the logits of all levels, which one forward made."""

from __future__ import annotations

from dataclasses import replace
from typing import cast

import torch
from torch import Tensor

from vllm_treespec.proposers.base import Proposer, ProposerInputs, tokens_of
from vllm_treespec.proposers.draft_filter import DraftFilter
from vllm_treespec.proposers.dynamic_tree import DynamicTree, frontier
from vllm_treespec.sampling.coupling import LIKELIEST, coupled_chances
from vllm_treespec.sources.base import BlockDraftModel
from vllm_treespec.trees.draft import Draft
from vllm_treespec.trees.sizes import TreeSizes


def sizes(tree: TreeSizes) -> TreeSizes:
    """Sizes of trees over a block: one forward reads the root and a row a level."""
    rows = 1 + tree.max_depth
    return replace(tree, draft_forwards=1, draft_width=1, draft_nodes=rows)


class DFlash(DynamicTree):
    """Drafts dynamic trees from heads of arXiv 2602.06036, 2606.18394 and 2607.05147.

    The tree is that of ``DynamicTree``, of which one forward made all levels' logits. A
    head that conditions on a node's token (DSpark, DFlash2) adds something to the
    logits below it; one that does not (DFlash, JetSpec) has the same for all nodes of a
    level. So all levels are scored at once: of each the ``LIKELIEST`` tokens, below
    each of those of the level above. All others count with their mass before anything
    is added.
    """

    def __init__(
        self,
        top_k: int,
        depth: int,
        num_drafts: int,
        min_probability: float | None = 0.0,
    ) -> None:
        """Take the limits of the trees, see ``DynamicTree``."""
        super().__init__(top_k, depth, num_drafts, min_probability)
        self.sizes = sizes(self.sizes)

    def propose(self, inputs: ProposerInputs) -> Draft:
        """Draft one tree per request; no level costs a forward."""
        (draft_model,) = inputs.draft_models
        block = cast(BlockDraftModel, draft_model)
        columns, chances = _chances(block, self.depth, inputs)
        token_ids = tokens_of(columns, block.vocabulary)
        filter_ = DraftFilter(self.min_probability, inputs)
        count = min(self.top_k, columns.shape[2])
        place = torch.zeros_like(inputs.root_token_ids)[:, None]
        # candidates that the nodes of a level are, and their joint probabilities
        nodes, joint = place, torch.zeros_like(place, dtype=torch.float64)
        tokens: list[Tensor] = []
        parents: list[Tensor] = []
        log_probs: list[Tensor] = []
        for level in range(self.depth):
            if level:
                place = frontier(children, self.top_k)
                nodes, joint = candidates.gather(1, place), children.gather(1, place)
            below = nodes[..., None].expand(-1, -1, chances.shape[3])
            best = chances[:, level].gather(1, below).topk(count, dim=-1)
            joints = filter_.of_drafts(joint[..., None] + best.values)
            children = inputs.within_levels(joints, level + 1).flatten(1)
            candidates = best.indices.flatten(1)
            tokens.append(token_ids[:, level].gather(1, candidates))
            parents.append(place.repeat_interleave(count, dim=1))
            log_probs.append(children)
        return replace(self.best(inputs, tokens, parents, log_probs), levels=1)


def _chances(
    block: BlockDraftModel, depth: int, inputs: ProposerInputs
) -> tuple[Tensor, Tensor]:
    """Score the candidates of all levels.

    Args:
        block: the levels.
        depth: how many of them.
        inputs: of the step.

    Returns:
        columns of the draft vocabulary, int64 [num_reqs, depth, count], and the log of
        how likely each is accepted below each of the level above (all the same above
        in the first level), float64 [num_reqs, depth, count, count].

    """
    probs = inputs.sampling.probs(block.level_logits[:, :depth])
    count = min(LIKELIEST, block.max_candidates, probs.shape[-1])
    mass, columns = probs.topk(count, dim=-1)
    logs = mass.double().log()[:, :, None].expand(-1, -1, count, -1)
    edges = block.edges(columns)
    if edges is not None:
        below = logs[:, 1:] + edges / inputs.sampling.divisors.view(-1, 1, 1, 1)
        total = below.logsumexp(-1, keepdim=True)
        if count < block.max_candidates:
            others = (1 - mass[:, 1:].double().sum(-1)).clamp(min=0)
            total = total.logaddexp(others.log()[..., None, None])
        logs = torch.cat([logs[:, :1], below - total], dim=1)
    if inputs.noise_keys is None or inputs.sampling.all_greedy:
        return columns, logs
    keys = inputs.noise_keys[:, :depth, None]
    noise = inputs.noise_of(keys, tokens_of(columns, block.vocabulary))
    chances = coupled_chances(noise[:, :, None], logs.exp()).log()
    greedy = inputs.sampling.greedy.view(-1, 1, 1, 1)
    return columns, torch.where(greedy, logs, chances)


class DrawnDFlash(Proposer):
    """Drafts other trees over a block, level by level."""

    def __init__(self, tree: Proposer) -> None:
        """Take what draws the tree."""
        self.tree = tree
        self.sizes = sizes(tree.sizes)

    def propose(self, inputs: ProposerInputs) -> Draft:
        """Draft one tree per request; levels after the first cost no forward."""
        plan = replace(inputs.plan, level_cost=0.0, max_levels=None)
        draft = self.tree.propose(replace(inputs, plan=plan))
        return replace(draft, levels=1)
