"""RSD-C: a tree with constant branching factors, siblings without replacement."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod

import torch
from torch import Tensor

from vllm_treespec.proposers.base import (
    Proposer,
    ProposerInputs,
    tokens_of,
)
from vllm_treespec.proposers.confidence import Confidence
from vllm_treespec.sampling.draws import draw_without_replacement
from vllm_treespec.sampling.laws import SamplingTensors
from vllm_treespec.trees.builders import from_levels
from vllm_treespec.trees.draft import Draft
from vllm_treespec.trees.sizes import TreeSizes


def level_widths(branching_factors: Sequence[int]) -> list[int]:
    """Nodes of each level, the root's first."""
    depths = range(len(branching_factors) + 1)
    return [prod(branching_factors[:depth]) for depth in depths]


def sizes(branching_factors: Sequence[int]) -> TreeSizes:
    """Sizes of trees with these children per node, by level."""
    widths = level_widths(branching_factors)
    return TreeSizes(
        max_nodes=sum(widths),
        max_depth=len(branching_factors),
        max_width=widths[-1],
        max_leaves=widths[-1],
        num_uniforms=sum(widths) - 1,
        max_siblings=max(branching_factors),
        max_parents=sum(widths[:-1]),
    )


class RsdC(Proposer):
    """Draws the tree of arXiv 2402.14160, section 3.2.1 and algorithm 3.

    A node at depth l gets ``branching_factors[l]`` children, drawn without
    replacement from the draft model's distribution after that node. At temperature
    0 they are its most likely tokens. Beyond the paper, drafts below
    ``min_probability`` are left out (``confidence.py``).
    """

    can_end_early = True
    draws_on_device = True
    min_probability: float

    def __init__(
        self, branching_factors: Sequence[int], min_probability: float = 0.0
    ) -> None:
        """Take the children per node of each level, for example ``(2, 2, 1)``."""
        self.branching_factors = tuple(branching_factors)
        self.min_probability = min_probability
        self.widths = level_widths(self.branching_factors)
        self.sizes = sizes(self.branching_factors)

    def propose(self, inputs: ProposerInputs) -> Draft:
        """Draw one tree per request, one draft forward per level."""
        (draft_model,) = inputs.draft_models
        num_reqs, device = inputs.root_token_ids.shape[0], inputs.root_token_ids.device
        logits = draft_model.root_logits()[:, None]
        uniforms = inputs.uniforms.split(self.widths[1:], dim=1)
        confidence = Confidence(self.min_probability, inputs)
        reached = torch.ones((num_reqs, 1), dtype=torch.bool, device=device)
        tokens: list[Tensor] = []
        parents: list[Tensor] = []
        valid: list[Tensor] = []
        level_probs: list[Tensor] = []
        for level, count in enumerate(self.branching_factors):
            probs = inputs.sampling.probs(logits)
            drawn, exists = draw_children(
                probs, count, uniforms[level], inputs.sampling
            )
            confidence.nodes = confidence.of_children(probs, drawn).flatten(1)
            exists = (exists & reached[..., None]).flatten(1)
            reached = exists & (confidence.nodes > -torch.inf)
            level_probs.append(probs)
            tokens.append(tokens_of(drawn.flatten(1), draft_model.vocabulary))
            valid.append(reached)
            parent = torch.arange(self.widths[level], device=device)
            parents.append(parent.repeat_interleave(count).expand(num_reqs, -1))
            if confidence.ends(reached) or level + 1 == self.sizes.max_depth:
                break
            logits = draft_model.extend(tokens[-1], parents[-1])
        draft_probs = (
            None if inputs.sampling.all_greedy else torch.cat(level_probs, dim=1)
        )
        draft = from_levels(
            inputs.root_token_ids,
            tokens,
            parents,
            valid,
            draft_probs,
            draft_model.vocabulary,
            claims=confidence.claims,
        )
        return replace(draft, levels=len(tokens))


def draw_children(
    probs: Tensor, count: int, uniforms: Tensor, sampling: SamplingTensors
) -> tuple[Tensor, Tensor]:
    """Draw each node's children: without replacement, or the top ones if greedy.

    Args:
        probs: float32 [num_reqs, width, vocab_size].
        count: children per node.
        uniforms: [num_reqs, width * count] in [0, 1).
        sampling: whose greedy requests take the most likely tokens.

    Returns:
        tokens int64 and exists bool, both [num_reqs, width, count].

    """
    shape = (*probs.shape[:2], count)
    if sampling.all_greedy:
        mass, best = probs.topk(count, dim=-1)
        return best, mass > 0
    tokens, exists = draw_without_replacement(
        probs.flatten(0, 1), uniforms.reshape(-1, count)
    )
    tokens, exists = tokens.view(shape), exists.view(shape)
    if not sampling.all_random:
        mass, best = probs.topk(count, dim=-1)
        greedy = sampling.greedy[:, None, None]
        tokens = torch.where(greedy, best, tokens)
        exists = torch.where(greedy, mass > 0, exists)
    return tokens, exists
