"""DFlash: trees over the logits of all levels, which one forward made."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import cast

import torch
from torch import Tensor

from vllm_treespec.proposers import dynamic_tree
from vllm_treespec.proposers.base import Proposer, ProposerInputs, tokens_of
from vllm_treespec.proposers.draft_filter import DraftFilter
from vllm_treespec.proposers.dynamic_tree import DynamicTree, drawn_chances, frontier
from vllm_treespec.sampling.coupling import LIKELIEST
from vllm_treespec.sampling.laws import SMALLEST, SamplingTensors
from vllm_treespec.sources.base import BlockDraftModel
from vllm_treespec.trees.draft import Draft
from vllm_treespec.trees.sizes import TreeSizes


def sizes(tree: TreeSizes) -> TreeSizes:
    """Sizes of trees over a block: one forward reads the root and a row a level."""
    rows = 1 + tree.max_depth
    return replace(tree, draft_forwards=1, draft_width=1, draft_nodes=rows)


class DFlash(DynamicTree):
    """Drafts dynamic trees from heads of arXiv 2602.06036, 2606.18394 and 2607.05147.

    The tree is that of ``DynamicTree`` among candidates: one forward made all levels'
    logits, and those of each level's ``LIKELIEST`` tokens are scored at once, below
    each of those of the level above. A head that conditions on a node's token (DSpark,
    DFlash2) adds something to the logits below it; one that does not (DFlash, JetSpec)
    has the same for all nodes of a level. All other tokens count with their mass before
    anything is added.
    """

    can_end_early = False

    @staticmethod
    def sizes_of(top_k: int, depth: int, num_drafts: int) -> TreeSizes:
        """Sizes of the trees, see ``DynamicTree``."""
        return sizes(dynamic_tree.sizes(top_k, depth, num_drafts))

    def propose(self, inputs: ProposerInputs) -> Draft:
        """Draft one tree per request; no level costs a forward."""
        (draft_model,) = inputs.draft_models
        block = cast(BlockDraftModel, draft_model)
        token_ids, chances = _chances(block, self.depth, inputs)
        filter_ = DraftFilter(self.min_probability, inputs)
        count = min(self.top_k, token_ids.shape[2])
        place = torch.zeros_like(inputs.root_token_ids)[:, None]
        # candidates that the nodes of a level are, and their joint probabilities
        nodes, joint = place, torch.zeros_like(place, dtype=torch.float64)
        candidates, children = nodes, joint
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
        their tokens, int64 [num_reqs, depth, count], and the log of how likely each is
        accepted below each of the level above (all the same above in the first level),
        float64 [num_reqs, depth, count, count].

    """
    sampling = inputs.sampling
    divisors = sampling.divisors.view(-1, 1, 1, 1)
    logits = block.level_logits[:, :depth].float() / divisors[..., 0]
    possible = min(block.max_candidates, logits.shape[-1])
    count = min(LIKELIEST, possible)
    values, columns = logits.topk(count, dim=-1)
    token_ids = tokens_of(columns, block.vocabulary)
    if possible < logits.shape[-1]:
        logits = logits.topk(possible, dim=-1).values
    logs = (values - logits.logsumexp(-1, keepdim=True)).double()[:, :, None]
    edges = block.edges(columns, token_ids) if depth > 1 else None
    if edges is not None:
        below = logs[:, 1:] + edges / divisors
        total = below.logsumexp(-1, keepdim=True)
        if count < possible:
            others = (1 - logs[:, 1:].exp().sum(-1, keepdim=True)).clamp(min=0)
            total = total.logaddexp(others.log())
        roots = logs[:, :1].expand(-1, -1, count, -1)
        logs = torch.cat([roots, below - total], dim=1)
    logs = logs.masked_fill(logs < math.log(SMALLEST), -torch.inf)
    if sampling.top_k is not None or sampling.top_p is not None:
        logs = _within_limits(logs, sampling)
    if inputs.follows_noise:
        assert inputs.noise_keys is not None
        keys = inputs.noise_keys[:, :depth, None, None]
        logs = drawn_chances(logs.exp(), token_ids[:, :, None], keys, inputs).log()
    return token_ids, logs.expand(-1, -1, count, -1)


def _within_limits(logs: Tensor, sampling: SamplingTensors) -> Tensor:
    """Apply top-k, then top-p, to distributions of which likely tokens are given.

    Args:
        logs: float64 [num_reqs, depth, rows, count], logs of probabilities.
        sampling: of the requests.

    Returns:
        the same, -inf for what is left out. Within a limit beyond these tokens all
        others count as they did.

    """
    best = logs.sort(dim=-1, descending=True)
    probs = best.values.exp()
    count, kept = probs.shape[-1], torch.ones_like(probs, dtype=torch.bool)
    whole = torch.ones_like(probs[..., :1])
    if sampling.top_k is not None:
        top_k = sampling.top_k.view(-1, 1, 1, 1)
        kept = kept & (torch.arange(count, device=probs.device) < top_k)
        within = (probs * kept).sum(-1, keepdim=True)
        whole = torch.where(top_k <= count, within, whole)
    if sampling.top_p is not None:
        least = sampling.top_p.view(-1, 1, 1, 1) * whole
        kept = kept & (probs.cumsum(-1) - probs < least)
        whole = torch.maximum((probs * kept).sum(-1, keepdim=True), least)
    limited = (best.values - whole.log()).masked_fill(~kept, -torch.inf)
    return torch.empty_like(limited).scatter(-1, best.indices, limited)


class DrawnDFlash(Proposer):
    """Drafts other trees over a block, level by level."""

    def __init__(self, tree: Proposer) -> None:
        """Take what draws the tree."""
        self.tree = tree
        self.sizes = sizes(tree.sizes)
        self.draws_on_device = tree.draws_on_device
        self.min_probability = tree.min_probability

    def propose(self, inputs: ProposerInputs) -> Draft:
        """Draft one tree per request; levels after the first cost no forward."""
        plan = replace(inputs.plan, level_cost=0.0, max_levels=None)
        draft = self.tree.propose(replace(inputs, plan=plan))
        return replace(draft, levels=1)
