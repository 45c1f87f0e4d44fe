"""ReDrafter: deterministic beam search, and the prefix tree of its beams."""

from __future__ import annotations

import torch
from torch import Tensor

from vllm_treespec.proposers.base import (
    DraftModel,
    Proposer,
    ProposerInputs,
    tokens_of,
)
from vllm_treespec.sampling.laws import SamplingTensors
from vllm_treespec.trees.builders import highest
from vllm_treespec.trees.draft import Draft
from vllm_treespec.trees.sizes import TreeSizes
from vllm_treespec.trees.tree import NO_NODE, TreeBatch


def sizes(beam_width: int, length: int, num_drafts: int) -> TreeSizes:
    """Sizes of trees of beams that keep at most ``num_drafts`` draft tokens."""
    num_kept = min(num_drafts, beam_width * length)
    return TreeSizes(
        max_nodes=1 + num_kept,
        max_depth=min(length, num_kept),
        max_width=min(beam_width, num_kept),
        max_leaves=min(beam_width, num_kept),
    )


class ReDrafter(Proposer):
    """Drafts the beams of arXiv 2403.09919, section 2, as one tree.

    Beam search keeps, at every level, the sequences of the highest joint probability
    under the request's sampling parameters (a greedy request's at temperature 1).
    The last level's beams become a tree in which every prefix is one node ("dynamic
    tree attention"); of a tree that is too large the most probable nodes are kept.
    Beams are no samples, so the trees have no ``draws``. A node claims the joint
    probability of its prefix.
    """

    draws_on_device = True

    def __init__(self, beam_width: int, length: int, num_drafts: int) -> None:
        """Take the number of beams, tokens of each, and draft nodes at most."""
        self.beam_width = beam_width
        self.length = length
        self.num_beam_tokens = beam_width * length
        self.num_drafts = min(num_drafts, self.num_beam_tokens)
        self.sizes = sizes(beam_width, length, num_drafts)

    def propose(self, inputs: ProposerInputs) -> Draft:
        """Draft one tree per request, one draft forward per level."""
        (draft_model,) = inputs.draft_models
        beams, log_probs = beam_search(
            draft_model, inputs.sampling, self.beam_width, self.length
        )
        return draft_of_beams(inputs.root_token_ids, beams, log_probs, self.num_drafts)


def beam_search(
    draft_model: DraftModel, sampling: SamplingTensors, beam_width: int, length: int
) -> tuple[Tensor, Tensor]:
    """Search for the most probable sequences, the best beam first.

    Args:
        draft_model: at the root.
        sampling: of the requests.
        beam_width: number of beams; no more than the draft vocabulary has tokens.
        length: tokens of a beam.

    Returns:
        tokens int64 and joint log probabilities of the beams' prefixes float32, both
        [num_reqs, width, length]; -inf where fewer sequences than beams are possible.

    """
    logits = draft_model.root_logits()[:, None]
    width = min(beam_width, logits.shape[-1])
    tokens: list[Tensor] = []
    parents: list[Tensor] = []
    log_probs = [torch.zeros(logits.shape[:2], device=logits.device)]
    for level in range(length):
        mass, columns = sampling.probs(logits).topk(width, dim=-1)
        children = (log_probs[-1][..., None] + mass.log()).flatten(1)
        joint, best = children.topk(width, dim=1)
        columns = columns.flatten(1).gather(1, best)
        log_probs.append(joint)
        parents.append(best // width)
        tokens.append(tokens_of(columns, draft_model.vocabulary))
        if level + 1 < length:
            logits = draft_model.extend(tokens[-1], parents[-1])
    beam_rows = [torch.arange(width, device=logits.device).expand_as(parents[-1])]
    for parent in reversed(parents[1:]):
        beam_rows.append(parent.gather(1, beam_rows[-1]))
    beams = torch.stack(beam_rows[::-1], dim=1)
    return (
        torch.stack(tokens, dim=1).gather(2, beams).transpose(1, 2),
        torch.stack(log_probs[1:], dim=1).gather(2, beams).transpose(1, 2),
    )


def prefix_match(beams: Tensor) -> Tensor:
    """First beam that has the same prefix (arXiv 2403.09919, listing 1, batched).

    Args:
        beams: int64 [num_reqs, width, length].

    Returns:
        int64, same shape: entry ``[r, i, j]`` is the smallest k for which the beams
        i and k of request r share their first j + 1 tokens.

    Example, one request::

        beams 91 92 93 95    prefix_match 0 0 0 0
              91 92 94 96                 0 0 1 1
              91 92 93 97                 0 0 0 2

    """
    equal = beams[:, :, None] == beams[:, None]
    return equal.cumprod(dim=3).argmax(dim=2)


def draft_of_beams(
    root_token_ids: Tensor, beams: Tensor, log_probs: Tensor, num_drafts: int
) -> Draft:
    """Merge the beams' common prefixes into one tree per request.

    Args:
        root_token_ids: int64 [num_reqs].
        beams: int64 [num_reqs, width, length].
        log_probs: [num_reqs, width, length], joint log probability of each prefix;
            prefixes of -inf become no nodes.
        num_drafts: draft nodes to keep, the most probable ones; among equals those
            nearer to the root, then those of earlier beams.

    Returns:
        trees of at most 1 + ``num_drafts`` nodes, siblings in the order of the first
        beam that has each; ``draws`` is None. Nodes claim the probability of their
        prefix.

    """
    width, length = beams.shape[1:]
    match = prefix_match(beams)
    beam = torch.arange(width, device=beams.device)[:, None]
    log_probs = log_probs.masked_fill(match != beam, -torch.inf)
    order = _neighbours(match)[..., None].expand_as(beams)
    # Level by level from here on, [num_reqs, length * width].
    token_ids = beams.gather(1, order).transpose(1, 2).flatten(1)
    log_probs = log_probs.gather(1, order).transpose(1, 2).flatten(1)
    kept = highest(log_probs, num_drafts)
    # A prefix that a beam shares with the beam before it has that one's node.
    nodes = kept.cumsum(1)
    parents = torch.nn.functional.pad(nodes[:, :-width], (width, 0))
    depths = torch.arange(1, length + 1, device=beams.device)[:, None]
    depths = depths.expand(len(beams), length, width).flatten(1)

    max_nodes = 1 + min(num_drafts, width * length)
    column = torch.where(kept, nodes, max_nodes)

    def by_node(values: Tensor, unused: int = 0) -> Tensor:
        row = values.new_full((len(values), max_nodes + 1), unused)
        return row.scatter_(1, column, values)[:, :max_nodes]

    tokens = by_node(token_ids)
    tokens[:, 0] = root_token_ids
    tree = TreeBatch(
        tokens, by_node(parents, NO_NODE), by_node(depths), 1 + nodes[:, -1]
    )
    return Draft(tree, by_node(log_probs.double().exp()), length)


def _neighbours(match: Tensor) -> Tensor:
    """Order of the beams in which equal prefixes are neighbours, int64 [reqs, width].

    Where two beams part, the one whose prefix occurs first comes first. ``match`` is
    :func:`prefix_match`'s result.
    """
    num_shared = (match[:, :, None] == match[:, None]).sum(dim=3)
    parting = num_shared.clamp(max=match.shape[2] - 1)
    occurs = match.gather(2, parting)
    num_before = (occurs.transpose(1, 2) < occurs).sum(dim=2)
    return num_before.argsort(dim=1, stable=True)
