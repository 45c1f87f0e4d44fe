"""Worth: which drafts are worth a row of the target, and which levels a forward."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from vllm_treespec.proposers.base import ProposerInputs

# Accepted tokens that the next level brings over those that it is thought to. Levels
# look best just before they end.
HOPED = 0.9


class Worth:
    """What drafts must claim: ``min_probability``, and the step's prices.

    Another level is worth a forward where the drafts that may be found there are,
    together. Prices follow from past steps alone.
    """

    def __init__(self, min_probability: float | None, inputs: ProposerInputs) -> None:
        """Take both; 0 and no prices leave nothing out."""
        self.inputs = inputs
        self.asks = min_probability != 0 or inputs.prices is not None
        # log of the least probability, float64 [num_reqs]
        logs = [
            math.log(least) if least else -math.inf
            for least in inputs.least(min_probability)
        ]
        self.least = torch.tensor(logs, dtype=torch.float64).to(
            inputs.root_token_ids.device
        )

    def of_drafts(self, log_probs: Tensor) -> Tensor:
        """Leave out drafts that claim too little.

        Args:
            log_probs: float64 [num_reqs, width, count], of each draft's path.

        Returns:
            the same with -inf for those that are left out.

        """
        if not self.asks:
            return log_probs
        too_little = log_probs < self.least[:, None, None]
        return log_probs.masked_fill(too_little, -torch.inf)

    def ends(self, level: int, likely: Tensor) -> bool:
        """Whether no level below this one is worth reading.

        Below each node a draft is hoped for that is as likely, beside its parent, as
        levels were in the mean beside those above them. Where the host must not wait
        for the device, the step's prices say how many levels are read.

        Args:
            level: of the drafts that were found last, from 1.
            likely: float64 [num_reqs, width], how likely each of those that would be
                read is accepted; 0 where there is none.

        """
        inputs, prices = self.inputs, self.inputs.prices
        if not inputs.host_may_wait:
            return prices is not None and level == prices.num_levels
        if inputs.num_drafts is not None:
            likely = likely * (inputs.num_drafts > 0)[:, None]
        if prices is None:
            return not bool(likely.any())
        hoped = HOPED * likely * likely.sum(1, keepdim=True) ** (1 / level)
        found = inputs.found or [0.0] * len(prices.kept)
        gains = [
            sum(max(claimed * kept - prices.draft, 0.0) for claimed in nodes)
            * (1 - elsewhere)
            for nodes, kept, elsewhere in zip(
                hoped.tolist(), prices.kept, found, strict=True
            )
        ]
        return sum(gains) <= prices.level
