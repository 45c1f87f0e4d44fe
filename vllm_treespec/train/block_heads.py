"""ReDrafter and Medusa heads in training: no context, positions one by one."""

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from vllm_treespec.heads import (
    DraftHead,
    HeadConfig,
    MedusaHeadConfig,
    ReDrafterHeadConfig,
)
from vllm_treespec.train.batches import HeadDataset, TeacherBatches
from vllm_treespec.train.head import HeadDrafter
from vllm_treespec.train.loss import TeacherTargets
from vllm_treespec.train.options import HeadOptions
from vllm_treespec.train.teacher import TeacherCache


class BlockHead(HeadDrafter):
    """A head of ResNet blocks; its loss is ``topk_kl`` over the draft vocabulary."""

    lighter = "--hot-tokens or --blocks"
    config_type: type[Any]
    options: HeadOptions
    head: DraftHead

    @classmethod
    def config_for(cls, target: PreTrainedModel, **sizes: Any) -> HeadConfig:
        """Give the head the width of the target's output layer."""
        width = target.get_output_embeddings().weight.shape[1]
        vocab_size = target.config.vocab_size
        return cls.config_type(hidden_size=width, vocab_size=vocab_size, **sizes)

    def batches(self, cache: TeacherCache, rows: list[int]) -> TeacherBatches:
        """Positions with the tokens that follow."""
        size, seed = self.options.batch_positions, self.options.seed
        return HeadDataset(cache, rows, size, self.config.depth, seed)

    def guesses(
        self, inputs: dict[str, Tensor]
    ) -> tuple[Tensor, Tensor, TeacherTargets]:
        """The guess after each supervised token."""
        supervised = inputs["supervised"]
        features = self._features(inputs, supervised)
        return supervised.nonzero()[:, 1], features, TeacherTargets.of(inputs)

    def loss(
        self, inputs: dict[str, Tensor], progress: float, generator: torch.Generator
    ) -> Tensor:
        """``topk_kl`` at a share of the deeper levels."""
        supervised = inputs["supervised"]
        device = supervised.device
        drawn = torch.rand(len(supervised), 1, generator=generator).to(device)
        levels = torch.arange(supervised.shape[1], device=device)
        used = supervised & (drawn < self.options.level_share**levels)
        targets = TeacherTargets.of(inputs).at(used[supervised])
        return self.kl(self._features(inputs, used), targets)

    def _features(self, inputs: dict[str, Tensor], wanted: Tensor) -> Tensor:
        """Wanted features, float32 [num_wanted, hidden_size], made in bfloat16."""
        with torch.autocast(wanted.device.type, dtype=torch.bfloat16):
            features = self.head(inputs["hidden"], inputs["token_ids"], wanted)
        return features.float()


class ReDrafter(BlockHead):
    """A ReDrafter head."""

    config_type = ReDrafterHeadConfig


class Medusa(BlockHead):
    """Medusa heads."""

    config_type = MedusaHeadConfig
