"""RSD-S: a tree drawn by stochastic beam search."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from vllm_treespec.proposers.base import (
    Proposer,
    ProposerInputs,
    tokens_of,
)
from vllm_treespec.proposers.confidence import Confidence
from vllm_treespec.proposers.rsd_c import draw_children
from vllm_treespec.sampling.draws import truncated_gumbel
from vllm_treespec.sampling.laws import SamplingTensors
from vllm_treespec.trees.builders import from_levels
from vllm_treespec.trees.draft import Draft
from vllm_treespec.trees.sizes import TreeSizes


def sizes(beam_width: int, depth: int) -> TreeSizes:
    """Sizes of trees of ``depth`` levels of ``beam_width`` nodes."""
    parents = 1 + beam_width * (depth - 1)
    return TreeSizes(
        max_nodes=1 + beam_width * depth,
        max_depth=depth,
        max_width=beam_width,
        max_leaves=beam_width + (depth - 1) * (beam_width - 1),
        num_uniforms=2 * parents * beam_width,
    )


class RsdS(Proposer):
    """Draws the tree of arXiv 2402.14160, section 3.2.1 and algorithm 8.

    Stochastic beam search keeps, at every level, the ``beam_width`` sequences with
    the highest perturbed log probability: sequences drawn without replacement
    (theorem 3.2: so are the children of every node, in that order). The perturbed
    log probabilities of a node's children are drawn from the highest down: the
    highest equals the node's own, each further one is a Gumbel around the log of the
    mass that is left, truncated at the one before. That is the law of perturbing the
    whole vocabulary (eq. 9 and 10), for a few numbers a node. At temperature 0 this
    becomes beam search. Beyond the paper, drafts below ``min_probability`` are left
    out (``confidence.py``).
    """

    can_end_early = True
    draws_on_device = True
    min_probability: float

    def __init__(
        self, beam_width: int, depth: int, min_probability: float = 0.0
    ) -> None:
        """Take the nodes per level and the number of levels."""
        self.beam_width = beam_width
        self.depth = depth
        self.min_probability = min_probability
        self.sizes = sizes(beam_width, depth)

    def propose(self, inputs: ProposerInputs) -> Draft:
        """Draw one tree per request, one draft forward per level."""
        (draft_model,) = inputs.draft_models
        num_reqs, device = inputs.root_token_ids.shape[0], inputs.root_token_ids.device
        logits = draft_model.root_logits()[:, None]
        uniforms = inputs.uniforms.unflatten(1, (2, -1, self.beam_width))
        log_probs = torch.zeros((num_reqs, 1), dtype=torch.float64, device=device)
        perturbed = torch.zeros_like(log_probs)
        confidence = Confidence(self.min_probability, inputs)
        tokens: list[Tensor] = []
        parents: list[Tensor] = []
        valid: list[Tensor] = []
        level_probs: list[Tensor] = []
        used = 0
        for level in range(self.depth):
            width = logits.shape[1]
            probs = inputs.sampling.probs(logits)
            columns, log_probs, perturbed = expand_beam(
                probs,
                log_probs,
                perturbed,
                uniforms[:, :, used : used + width],
                inputs.sampling,
            )
            used += width
            sure = confidence.of_children(probs, columns)
            perturbed = perturbed.masked_fill(sure == -torch.inf, -torch.inf)
            parent, perturbed, column, log_probs, confidence.nodes = select_beam(
                perturbed, self.beam_width, columns, log_probs, sure
            )
            perturbed = inputs.within_levels(perturbed, level + 1)
            level_probs.append(probs)
            parents.append(parent)
            tokens.append(tokens_of(column, draft_model.vocabulary))
            valid.append(perturbed > -torch.inf)
            if confidence.ends(valid[-1]) or level + 1 == self.depth:
                break
            logits = draft_model.extend(tokens[-1], parent)
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


def expand_beam(
    probs: Tensor,
    log_probs: Tensor,
    perturbed: Tensor,
    uniforms: Tensor,
    sampling: SamplingTensors,
) -> tuple[Tensor, Tensor, Tensor]:
    """Draw the best children of every node of the beam.

    Args:
        probs: float32 [num_reqs, width, vocab_size].
        log_probs: float64 [num_reqs, width], of the sequences so far (phi).
        perturbed: float64 [num_reqs, width], perturbed and truncated (psi); -inf
            marks a place of the beam that holds no sequence.
        uniforms: [num_reqs, 2, width, beam_width] in [0, 1).
        sampling: whose greedy requests are not perturbed.

    Returns:
        token ids, log probabilities and perturbed log probabilities of the
        children, each [num_reqs, width, beam_width], -inf where there is no child.

    """
    count = min(uniforms.shape[-1], probs.shape[-1])
    tokens, exists = draw_children(
        probs, count, uniforms[:, 0, :, :count].flatten(1), sampling
    )
    exists = exists & (perturbed > -torch.inf)[..., None]
    mass = probs.gather(-1, tokens).double()
    child_log_probs = log_probs[..., None] + mass.log()
    if sampling.all_greedy:
        child_perturbed = child_log_probs
    else:
        child_perturbed = perturb_children(
            probs, tokens, mass * exists, log_probs, perturbed, uniforms[:, 1]
        )
    if not (sampling.all_greedy or sampling.all_random):
        greedy = sampling.greedy[:, None, None]
        child_perturbed = torch.where(greedy, child_log_probs, child_perturbed)
    nothing = torch.full_like(child_log_probs, -torch.inf)
    return (
        tokens,
        torch.where(exists, child_log_probs, nothing),
        torch.where(exists, child_perturbed, nothing),
    )


def perturb_children(
    probs: Tensor,
    tokens: Tensor,
    mass: Tensor,
    log_probs: Tensor,
    perturbed: Tensor,
    uniforms: Tensor,
) -> Tensor:
    """Draw the perturbed log probabilities of drawn children, from the highest down.

    Args:
        probs: float32 [num_reqs, width, vocab_size].
        tokens: int64 [num_reqs, width, count], the children in draw order.
        mass: float64, same shape, their probabilities; 0 where there is no child.
        log_probs: float64 [num_reqs, width], of the parents (phi).
        perturbed: float64 [num_reqs, width], of the parents (psi).
        uniforms: [num_reqs, width, at least count] in [0, 1).

    Returns:
        float64 [num_reqs, width, count].

    """
    # Summed from the last child up: 1 - (mass before) would be rounding when the
    # first child has nearly all of it.
    undrawn = probs.scatter(-1, tokens, 0.0).sum(-1, keepdim=True)
    left = undrawn + mass.flip(-1).cumsum(-1).flip(-1)
    location = log_probs[..., None] + left.log()
    values = [perturbed]
    for k in range(1, tokens.shape[-1]):
        values.append(truncated_gumbel(location[..., k], values[-1], uniforms[..., k]))
    return torch.stack(values, dim=-1)


def select_beam(
    perturbed: Tensor, beam_width: int, *values: Tensor
) -> tuple[Tensor, ...]:
    """Keep the ``beam_width`` best children, siblings side by side and best first.

    Args:
        perturbed: [num_reqs, width, count], what selects, and orders siblings.
        beam_width: how many to keep.
        values: of the same shape, what else is known of the children.

    Returns:
        parents (index within the level above), perturbed log probabilities and other
        values of the children that are kept, each [num_reqs, beam_width].

    """
    width, count = perturbed.shape[1:]
    num_children = perturbed[0].numel()
    best = perturbed.flatten(1).topk(min(beam_width, num_children), dim=1).indices
    # Children of one node lie in draw order, so ascending places keep siblings
    # together, best first.
    best = best.sort(dim=1).values
    if num_children < beam_width:
        best = torch.nn.functional.pad(best, (0, beam_width - num_children), value=-1)
    absent = best < 0
    best = best.clamp(min=0)
    chosen_perturbed = perturbed.flatten(1).gather(1, best)
    return (
        torch.where(absent, width - 1, best // count),
        chosen_perturbed.masked_fill(absent, -torch.inf),
        *(value.flatten(1).gather(1, best) for value in values),
    )
