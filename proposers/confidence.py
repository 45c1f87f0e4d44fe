"""Confidence: below which paths a draft model draws nothing more."""

from __future__ import annotations

import torch
from torch import Tensor

from vllm_treespec.proposers.base import ProposerInputs
from vllm_treespec.proposers.draft_filter import DraftFilter


class Confidence:
    """Leaves out drafts that are hardly accepted, level by level.

    A greedy request's draft counts with the probability of its path. A sampled one's
    counts with that of the likeliest path beside it: the product, along the path, of
    the highest draft probability at each node above. So its own token does not decide
    whether a draft is there, and verification stays exact.

    The node of the highest confidence in each level claims it, and the others claim 0.
    So the claims of a tree add up to the accepted tokens of its likeliest path.
    """

    def __init__(self, min_probability: float, inputs: ProposerInputs) -> None:
        """Begin at the roots."""
        self.filter = DraftFilter(min_probability, inputs)
        self.sampling = inputs.sampling
        # per level that was drawn, float64 [num_reqs, width], see ``Draft``
        self.claims: list[Tensor] = []
        # float64 [num_reqs, width], log confidence of the level's nodes
        self.nodes = torch.zeros_like(
            inputs.root_token_ids[:, None], dtype=torch.float64
        )

    def of_children(self, probs: Tensor, columns: Tensor) -> Tensor:
        """Log confidence of the children of each node.

        Args:
            probs: float32 [num_reqs, width, vocab_size], after each node.
            columns: int64 [num_reqs, width, count], the children's.

        Returns:
            float64 [num_reqs, width, count], -inf for those to leave out.

        """
        if self.sampling.all_greedy:
            mass = probs.gather(-1, columns)
        else:
            mass = probs.amax(-1, keepdim=True).expand(columns.shape)
            if not self.sampling.all_random:
                greedy = self.sampling.greedy[:, None, None]
                mass = torch.where(greedy, probs.gather(-1, columns), mass)
        return self.filter.of_drafts(self.nodes[..., None] + mass.double().log())

    def ends(self, drawn: Tensor) -> bool:
        """Count a level, and say whether no level below it is worth reading.

        Args:
            drawn: bool [num_reqs, width], which places of the level hold a node.

        """
        confidences = self.nodes.exp() * drawn
        likely, best = confidences.max(1, keepdim=True)
        self.claims.append(torch.zeros_like(confidences).scatter_(1, best, likely))
        return self.filter.ends(len(self.claims), likely)
