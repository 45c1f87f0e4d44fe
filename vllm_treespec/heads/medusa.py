"""Medusa's heads: one for each level, all on the target's hidden state alone."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from vllm_treespec.heads.base import DraftHead, ResNetBlock, unit_rms
from vllm_treespec.heads.config import MedusaHeadConfig


class MedusaHead(DraftHead):
    """The heads of arXiv 2401.10774, section 2.1.1 (Medusa-1: the target is frozen).

    Head k guesses the token k + 1 places after the one that the target emits from the
    hidden state, whatever stands between: ResNet blocks, then the output layer. The
    output layer is one for all heads here.
    """

    config: MedusaHeadConfig

    def __init__(self, config: MedusaHeadConfig) -> None:
        """Make fresh heads, each starting as the target's own next-token guess."""
        super().__init__(config)
        self.heads = nn.ModuleList(
            nn.Sequential(
                *(ResNetBlock(config.hidden_size) for _ in range(config.num_blocks))
            )
            for _ in range(config.depth)
        )

    def forward(self, hidden: Tensor, token_ids: Tensor, wanted: Tensor) -> Tensor:
        """Features at known tokens, which Medusa does not read; see ``DraftHead``."""
        hidden = unit_rms(hidden)
        features = [
            head(hidden[rows]) for head, rows in zip(self.heads, wanted.T, strict=True)
        ]
        # from level by level to row by row
        level, row = wanted.T.nonzero().unbind(1)
        return torch.cat(features)[(row * len(self.heads) + level).argsort()]

    def draft(self, hidden: Tensor, root_token_ids: Tensor) -> MedusaDraft:
        """Begin the trees of a step; all levels' logits are computed at once."""
        hidden = unit_rms(hidden)
        features = torch.stack([head(hidden) for head in self.heads], dim=1)
        return MedusaDraft(self, self.logits(features))


class MedusaDraft:
    """The trees that Medusa heads grow in one step; a ``DraftModel``.

    Attributes:
        level_logits: [num_reqs, depth, draft_vocab_size].

    """

    def __init__(self, head: MedusaHead, level_logits: Tensor) -> None:
        """Take the logits of all levels."""
        self.level_logits = level_logits
        self.level = 0
        self.vocabulary = head.hot_token_ids

    def root_logits(self) -> Tensor:
        """Logits below the roots, [num_reqs, draft_vocab_size]."""
        return self.level_logits[:, 0]

    def extend(self, token_ids: Tensor, parents: Tensor) -> Tensor:
        """The next head's logits for every node; it looks at no drafted token."""
        self.level += 1
        return self.level_logits[:, self.level, None].expand(-1, token_ids.shape[1], -1)
