"""Draft filter: which drafts are worth a row of the target, which levels a forward."""

from __future__ import annotations

import torch
from torch import Tensor

from vllm_treespec.proposers.base import ProposerInputs
from vllm_treespec.trees.source import Source

# Accepted tokens that the next level brings over those that it is thought to. Levels
# look best just before they end.
HOPED = 0.9


class DraftFilter:
    """Leaves out drafts and levels of a model that cost more than they bring.

    A draft must claim ``min_probability``, and what the step's plan says. Another level
    is worth a forward where the drafts that may be found there are, together. A plan
    follows from past steps alone.
    """

    def __init__(self, min_probability: float | None, inputs: ProposerInputs) -> None:
        """Take both; 0 and a plan that prunes nothing leave nothing out."""
        self.inputs = inputs
        self.is_on = min_probability != 0 or inputs.plan.prunes
        self.least = inputs.log_min_claims(Source.MODEL, min_probability)

    def of_drafts(self, log_probs: Tensor) -> Tensor:
        """Leave out drafts that claim too little.

        Args:
            log_probs: float64 [num_reqs, width, count], of each draft's path.

        Returns:
            the same with -inf for those that are left out.

        """
        if not self.is_on:
            return log_probs
        too_little = log_probs < self.least[:, None, None]
        return log_probs.masked_fill(too_little, -torch.inf)

    def ends(self, level: int, likely: Tensor) -> bool:
        """Whether no level below this one is worth reading.

        Below each node a draft is hoped for that is as likely, beside its parent, as
        levels were in the mean beside those above them. The plan may say how many
        levels are read at most, and how many where the host must not wait.

        Args:
            level: of the drafts that were found last, from 1.
            likely: float64 [num_reqs, width], how likely each of those that would be
                read is accepted; 0 where there is none.

        """
        inputs, plan = self.inputs, self.inputs.plan
        if level == plan.max_levels or not inputs.can_sync:
            return level == plan.max_levels
        if not plan.prunes:
            return not bool(likely.any())
        hoped = HOPED * likely * likely.sum(1, keepdim=True) ** (1 / level)
        kept = plan.kept[Source.MODEL]
        gains = [
            sum(max(claim * ratio - plan.row_cost, 0.0) for claim in nodes)
            for nodes, ratio in zip(hoped.tolist(), kept, strict=True)
        ]
        return not plan.level_pays(gains)
