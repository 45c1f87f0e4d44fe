"""Stochastic tree: drawn by stochastic beam search, the best of all levels kept."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from vllm_treespec.proposers import dynamic_tree
from vllm_treespec.proposers.base import Proposer, ProposerInputs, tokens_of
from vllm_treespec.proposers.dynamic_tree import frontier, useful
from vllm_treespec.proposers.rsd_s import expand_beam
from vllm_treespec.trees.builders import from_candidates
from vllm_treespec.trees.draft import Draft
from vllm_treespec.trees.sizes import TreeSizes


def sizes(top_k: int, depth: int, num_drafts: int) -> TreeSizes:
    """Sizes of trees of the ``num_drafts`` best of the drawn candidates."""
    width, depth = useful(top_k, depth, num_drafts)
    expanded = 1 + width * (depth - 1)
    return replace(
        dynamic_tree.sizes(top_k, depth, num_drafts),
        num_uniforms=2 * expanded * width,
    )


class StochasticTree(Proposer):
    """Draws a dynamic tree whose nodes are samples, for recursive rejection.

    Stochastic beam search (arXiv 2402.14160, section 3.2.1; ``rsd_s.py``) draws up to
    ``top_k`` children of each of the ``top_k`` best nodes of a level, without
    replacement. Their perturbed log probabilities (psi there) rank the nodes of a
    level, and the candidates of all levels: the ``num_drafts`` highest are the tree.

    A node's value does not depend on its own token, given the tokens drawn before it,
    and no descendant has a higher one. So whether a node is in the tree does not
    depend on its token, and recursive rejection is lossless. Ranked by probability it
    would not be. At temperature 0 this is the dynamic tree.
    """

    draws_on_device = True
    name = "stochastic_tree"

    def __init__(self, top_k: int, depth: int, num_drafts: int) -> None:
        """Take nodes read a level (and children of each), levels, and draft nodes."""
        self.top_k, self.depth = useful(top_k, depth, num_drafts)
        self.num_drafts = num_drafts
        self.sizes = sizes(top_k, depth, num_drafts)

    def propose(self, inputs: ProposerInputs) -> Draft:
        """Draw one tree per request, one draft forward per level."""
        (draft_model,) = inputs.draft_models
        vocabulary = draft_model.vocabulary
        logits = draft_model.root_logits()[:, None]
        uniforms = inputs.uniforms.unflatten(1, (2, -1, self.top_k))
        place = torch.zeros_like(inputs.root_token_ids)[:, None]
        phi = torch.zeros_like(place, dtype=torch.float64)
        psi = torch.zeros_like(phi)
        tokens: list[Tensor] = []
        parents: list[Tensor] = []
        perturbed: list[Tensor] = []
        level_probs: list[Tensor] = []
        used = 0
        for level in range(self.depth):
            probs = inputs.sampling.probs(logits)
            level_probs.append(probs)
            numbers = uniforms[:, :, used : used + probs.shape[1]]
            used += probs.shape[1]
            columns, log_probs, values = expand_beam(
                probs, phi, psi, numbers, inputs.sampling
            )
            values = inputs.within_levels(values, level + 1)
            count = columns.shape[-1]
            tokens.append(tokens_of(columns.flatten(1), vocabulary))
            parents.append(place.repeat_interleave(count, dim=1))
            perturbed.append(values.flatten(1))
            if level + 1 < self.depth:
                place = frontier(perturbed[-1], self.top_k)
                phi = log_probs.flatten(1).gather(1, place)
                psi = perturbed[-1].gather(1, place)
                read = tokens[-1].gather(1, place)
                logits = draft_model.extend(read, place // count)
        draft_probs = None
        if not inputs.sampling.all_greedy:
            draft_probs = torch.cat(level_probs, dim=1)
        draft = from_candidates(
            inputs.root_token_ids,
            tokens,
            parents,
            perturbed,
            self.num_drafts,
            draft_probs,
            vocabulary,
            rows=torch.arange(used * count, device=place.device) // count,
        )
        return replace(draft, levels=len(tokens))
