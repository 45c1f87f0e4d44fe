"""Heads in training: start from a target, figures by level, the folder."""

from abc import abstractmethod
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from vllm_treespec.heads import (
    HeadConfig,
    HeadError,
    build_head,
    load_any_head,
    save_head,
)
from vllm_treespec.heads.base import Head
from vllm_treespec.train.batches import ContextDataset, TeacherBatches
from vllm_treespec.train.drafter import Drafter
from vllm_treespec.train.loss import (
    Quality,
    TeacherTargets,
    VocabRows,
    quality_of,
    topk_kl,
)
from vllm_treespec.train.options import DistillOptions, Shape
from vllm_treespec.train.teacher import TargetStatistics, TeacherCache

# Ranks whose accuracy is measured, for static trees.
NUM_RANKS = 10


class HeadDrafter(Drafter):
    """A head, which is measured by level.

    Attributes:
        config_for: makes the configuration for a target, given further fields of it.
        head: that is trained, once ``start`` or ``take`` was called.
    """

    config_for: Any
    head: Any

    def __init__(self, options: DistillOptions, config: HeadConfig) -> None:
        super().__init__(options)
        self.config: Any = config
        self.layers = config.layers

    @classmethod
    def plan(
        cls,
        shape: Shape,
        options: DistillOptions,
        num_hot_tokens: int | None,
        target: PreTrainedModel,
    ) -> Self:
        """Configure a head of these sizes."""
        sizes = {**shape.sizes(), "num_hot_tokens": num_hot_tokens}
        return cls(options, cls.config_for(target, **sizes))

    def build(self, target: PreTrainedModel, statistics: TargetStatistics) -> Any:
        """Make the fresh layers."""
        return build_head(self.config)

    def batches(self, cache: TeacherCache, rows: list[int]) -> TeacherBatches:
        """Whole conversations with their hidden states."""
        return ContextDataset(cache, rows, self.options.batch_tokens, self.layers)

    @abstractmethod
    def guesses(
        self, inputs: dict[str, Tensor]
    ) -> tuple[Tensor, Tensor, TeacherTargets]:
        """What the head guesses in one batch, given the true tokens in between.

        Returns:
            int64 [n], level of each guess; float32 [n, width of ``output_weight``],
            what the output layer reads; and the targets.
        """

    @classmethod
    def of_folder(
        cls, folder: Path, options: DistillOptions, target: PreTrainedModel
    ) -> Self:
        """A trained head, to be measured.

        Raises:
            HeadError: the folder holds no whole head, or one for another target.
        """
        known = target.config.get_text_config()
        head = load_any_head(folder, known.num_hidden_layers).float()
        drafter = cls(options, head.config)
        size = target.get_output_embeddings().weight.shape[1]
        ours = (head.config.target_hidden_size, head.config.vocab_size)
        theirs = (size, known.vocab_size)
        if ours != theirs:
            raise HeadError(
                f"{folder} is for hidden states of {ours[0]} and {ours[1]} tokens,"
                f" {target.name_or_path} has {theirs[0]} and {theirs[1]}: pass the"
                f" target that it was trained for"
            )
        drafter.take(head, target)
        return drafter

    def start(self, target: PreTrainedModel, statistics: TargetStatistics) -> None:
        """Make a fresh head: the likeliest tokens are hot, own weights the target's."""
        head = self.build(target, statistics)
        if head.hot_token_ids is not None:
            head.hot_token_ids.copy_(statistics.likeliest(len(head.hot_token_ids)))
        self.take(head, target)
        with torch.no_grad():
            if not head.config.share_embedding:
                head.embedding.weight.copy_(target.get_input_embeddings().weight)
            if not head.config.share_output:
                output = target.get_output_embeddings().weight
                head.output.weight.copy_(head.output_rows(output))

    def take(self, head: Head, target: PreTrainedModel) -> None:
        """Use this head, with the weights that it shares with the target."""
        output = target.get_output_embeddings().weight
        self.head = head.to(output.device)
        self.head.share(target.get_input_embeddings().weight, output)
        # The Trainer would write into a ``config`` that its model has.
        self.model = nn.ModuleDict({"head": self.head})

    @cached_property
    def rows(self) -> VocabRows:
        """The draft vocabulary as the rows of the head's output layer."""
        hot = self.head.hot_token_ids
        rows = torch.arange(
            self.config.draft_vocab_size, device=self.head.output.weight.device
        )
        return VocabRows.of(
            rows, slice(None) if hot is None else hot, self.config.vocab_size
        )

    def kl(self, read: Tensor, targets: TeacherTargets) -> Tensor:
        """``topk_kl`` over the draft vocabulary.

        Args:
            read: float32 [n, width of ``output_weight``], what the output layer reads.
            targets: of the same n guesses.
        """
        weight, columns = self.head.output.weight, self.head.output_columns()
        return topk_kl(read, weight, targets, self.rows, torch.bfloat16, columns)

    def judged(self, inputs: dict[str, Tensor]) -> tuple[Tensor, Quality]:
        """Level of each guess in one batch, int64 [n], and their quality."""
        levels, features, targets = self.guesses(inputs)
        weight = self.head.output_weight()
        return levels, quality_of(features, weight, targets, self.rows)

    def quality(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        """Quality of the batch's guesses, by level."""
        levels, quality = self.judged(inputs)
        found = {"kl": quality.kl}
        for i in range(self.config.depth):
            at = levels == i
            found[f"accuracy_{i + 1}"] = (quality.rank[at] == 0).float()
            found[f"acceptance_{i + 1}"] = quality.acceptance[at]
        return found

    @torch.no_grad()
    def measure(self, data: TeacherBatches) -> dict[str, list[Any]]:
        """Measure the head by level.

        Returns:
            ``accuracies``: by level and rank, how often that guess is the target's
            likeliest token; ``acceptance``: by level, mean chance that one draft token
            is accepted at temperature 1.
        """
        depth, device = self.config.depth, self.head.output.weight.device
        counts = torch.zeros(depth, NUM_RANKS + 1)
        accepted = torch.zeros(depth)
        for number in range(len(data)):
            inputs = {name: value.to(device) for name, value in data[number].items()}
            levels, quality = self.judged(inputs)
            rank = quality.rank.clamp(max=NUM_RANKS)
            places = levels * (NUM_RANKS + 1) + rank
            found = torch.bincount(places, minlength=counts.numel())
            counts += found.view(depth, -1).cpu()
            accepted.index_add_(0, levels.cpu(), quality.acceptance.cpu())
        total = counts.sum(1).clamp_min(1)
        return {
            "accuracies": _rounded(counts[:, :-1] / total[:, None]),
            "acceptance": _rounded(accepted / total),
        }

    def description(self) -> dict[str, Any]:
        """The head's configuration."""
        found: dict[str, Any] = self.config.model_dump(
            mode="json", exclude={"rank_accuracies"}
        )
        return found

    def record(self, evaluation: TeacherBatches) -> dict[str, Any]:
        """Options, and accuracies by rank, which the configuration holds too."""
        ranks = self.measure(evaluation)["accuracies"]
        if "rank_accuracies" in type(self.config).model_fields:
            config = {**self.config.model_dump(), "rank_accuracies": ranks}
            self.config = self.head.config = type(self.config).model_validate(config)
        return {"rank_accuracies": ranks, "training": asdict(self.options)}

    def save(self, folder: Path) -> None:
        """Write the head's folder."""
        save_head(self.head, folder)


def _rounded(values: Tensor) -> list[Any]:
    found: list[Any] = (values.double() * 1e4).round().div(1e4).tolist()
    return found
