"""One-pass heads in training: blocks at random anchors of whole conversations."""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from vllm_treespec.heads import (
    DFlashHead,
    DFlashHeadConfig,
)
from vllm_treespec.train.blocks import read_blocks
from vllm_treespec.train.head import HeadDrafter
from vllm_treespec.train.loss import TeacherTargets
from vllm_treespec.train.options import DFlashOptions
from vllm_treespec.train.pair_heads import WEIGHT_STD, layers_to_read, target_sizes
from vllm_treespec.train.teacher import TargetStatistics


class DFlash(HeadDrafter):
    """A head of DSpark's form (arXiv 2607.05147), or of marginals alone (2602.06036).

    Its loss is ``topk_kl`` of levels of random blocks, given the text's own tokens.
    """

    lighter = "--hot-tokens, --markov-rank or --intermediate-size"
    options: DFlashOptions
    head: DFlashHead

    @staticmethod
    def config_for(
        target: PreTrainedModel,
        block_size: int,
        intermediate_size: int = 0,
        mask_token: int | None = None,
        **sizes: Any,
    ) -> DFlashHeadConfig:
        """Configure a head; see ``target_sizes`` and ``layers_to_read``.

        Args:
            target: of Llama's kind.
            block_size: levels.
            intermediate_size: 0: the target's.
            mask_token: None: the last of the vocabulary.
            sizes: further fields.

        Raises:
            ValueError: the target has no such token.
        """
        known = target_sizes(target)
        if intermediate_size:
            known["intermediate_size"] = intermediate_size
        last = known["vocab_size"] - 1
        if mask_token is not None and mask_token > last:
            raise ValueError(
                f"--mask-token {mask_token} is no token of the target; pass one from 0"
                f" to {last}"
            )
        num_layers = target.config.get_text_config().num_hidden_layers
        return DFlashHeadConfig(
            **known,
            target_layers=layers_to_read("three", num_layers),
            sample_from_anchor=True,
            block_size=block_size,
            depth=block_size,
            mask_token_id=last if mask_token is None else mask_token,
            **sizes,
        )

    @torch.no_grad()
    def build(
        self, target: PreTrainedModel, statistics: TargetStatistics
    ) -> DFlashHead:
        """Make a fresh head; its Markov bias starts as nothing."""
        head = DFlashHead(self.config)
        for matrix in _layer_matrices(head):
            matrix.normal_(std=WEIGHT_STD)
        return head

    def muon_matrices(self) -> list[Tensor]:
        """Those of the layers: half as many steps do, measured beside AdamW."""
        return _layer_matrices(self.head)

    def guesses(
        self, inputs: dict[str, Tensor]
    ) -> tuple[Tensor, Tensor, TeacherTargets]:
        """All levels of blocks at the same anchors each time."""
        generator = torch.Generator().manual_seed(0)
        return self._guesses(inputs, generator, level_share=1.0)

    def loss(
        self, inputs: dict[str, Tensor], progress: float, generator: torch.Generator
    ) -> Tensor:
        """``topk_kl`` at a share of the deeper levels."""
        share = self.options.level_share
        _, read, targets = self._guesses(inputs, generator, share)
        return self.kl(read, targets)

    def _guesses(
        self, inputs: dict[str, Tensor], generator: torch.Generator, level_share: float
    ) -> tuple[Tensor, Tensor, TeacherTargets]:
        """What blocks at drawn anchors guess, see ``guesses``."""
        pairs, device = inputs["pairs"], inputs["pairs"].device
        drawn = torch.rand(2, len(pairs), generator=generator).to(device)
        # at least one
        share = drawn[0].min().clamp(min=self.options.anchor_share)
        anchors = (drawn[0] <= share).nonzero()[:, 0]
        levels = torch.arange(self.config.num_levels, device=device)
        wanted = levels <= inputs["left"][anchors, None]
        wanted &= drawn[1, anchors, None] < level_share**levels
        blocks, level = wanted.nonzero(as_tuple=True)
        before = inputs["token_ids"][:, 1:].flatten()[pairs[anchors][blocks] + level]
        with torch.autocast(device.type, dtype=torch.bfloat16):
            states = read_blocks(self.head, inputs, anchors)
        read = self.head.output_inputs_after(states[wanted].float(), before)
        targets = TeacherTargets.of(inputs).at(anchors[blocks] + level)
        return level, read, targets


def _layer_matrices(head: DFlashHead) -> list[Tensor]:
    """What combines hidden states, and the matrices of decoder layers."""
    modules = (head.combine, *head.layers.modules())
    return [module.weight for module in modules if isinstance(module, nn.Linear)]
