"""What the kinds of drafters differ in while they are trained."""

from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from vllm_treespec.train.batches import TeacherBatches
from vllm_treespec.train.options import DistillOptions
from vllm_treespec.train.teacher import TargetStatistics, TeacherCache


class Drafter(ABC):
    """A drafter in training.

    Attributes:
        options: of its training.
        layers: of the target, whose hidden states it reads, see ``TeacherOptions``.
        model: what is trained, once ``start`` has made it.
        lighter: command-line options that make its weights smaller.
    """

    lighter = "--hot-tokens"
    layers: tuple[int, ...] = ()
    model: nn.Module

    def __init__(self, options: DistillOptions) -> None:
        self.options: Any = options

    @classmethod
    @abstractmethod
    def plan(
        cls,
        shape: Any,
        options: Any,
        num_hot_tokens: int | None,
        target: PreTrainedModel,
    ) -> Self:
        """Fit a drafter's sizes to a target, before its teacher pass.

        Raises:
            ValueError: the target cannot have such a drafter.
        """

    @abstractmethod
    def start(self, target: PreTrainedModel, statistics: TargetStatistics) -> None:
        """Make the first weights; torch's generator is seeded."""

    @abstractmethod
    def batches(self, cache: TeacherCache, rows: list[int]) -> TeacherBatches:
        """Batches of some rows of the cache."""

    @abstractmethod
    def loss(
        self, inputs: dict[str, Tensor], progress: float, generator: torch.Generator
    ) -> Tensor:
        """The mean loss of one batch.

        Args:
            inputs: an item of ``batches``.
            progress: share of the steps that were taken.
            generator: on the CPU, seeded by the step: a resumed run draws what an
                uncut one would.
        """

    @abstractmethod
    def quality(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        """Values to average over all evaluation batches, by name, each [n]."""

    def special_groups(self) -> list[dict[str, Any]]:
        """Optimizer groups of parameters that have a learning rate of their own."""
        return []

    def muon_matrices(self) -> list[Tensor]:
        """Matrices that Muon trains, in place of AdamW."""
        return []

    @abstractmethod
    def description(self) -> dict[str, Any]:
        """What a run must have in common with the one that it resumes."""

    @abstractmethod
    def record(self, evaluation: TeacherBatches) -> dict[str, Any]:
        """What training.json says of the trained weights, measured last."""

    @abstractmethod
    def save(self, folder: Path) -> None:
        """Write config.json, model.safetensors and what else serving reads."""
