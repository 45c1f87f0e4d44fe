"""A draft model in training: it learns the target's distributions token by token."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
)

from vllm_treespec.train.batches import BatchDataset, TeacherBatches
from vllm_treespec.train.drafter import Drafter
from vllm_treespec.train.loss import (
    TeacherTargets,
    choose_vocab_rows,
    quality_of,
    topk_kl,
)
from vllm_treespec.train.options import DraftOptions, DraftShape
from vllm_treespec.train.teacher import TargetStatistics, TeacherCache

# RMS of one embedding entry at the start. Llama adds layer outputs to the embedding as
# it is. The outputs of fresh layers, which are added to it, have an RMS of about 0.1.
EMBEDDING_RMS = 0.12


class DraftModel(Drafter):
    """A small Llama whose tied embedding is cut out of the target's.

    Attributes:
        core: int64 [core_rows], the target's likeliest tokens.
        hot_token_ids: int64 [num_hot_tokens], the ones to draft, ascending; None: all.
    """

    lighter = "--hidden-size"
    options: DraftOptions
    model: LlamaForCausalLM

    def __init__(
        self,
        options: DraftOptions,
        shape: DraftShape,
        config: LlamaConfig,
        num_hot_tokens: int | None,
    ) -> None:
        super().__init__(options)
        self.shape, self.config = shape, config
        self.num_hot_tokens = num_hot_tokens

    @classmethod
    def plan(
        cls,
        shape: DraftShape,
        options: DraftOptions,
        num_hot_tokens: int | None,
        target: PreTrainedModel,
    ) -> Self:
        """Fit the shape to the target's vocabulary and positions."""
        return cls(options, shape, draft_config(target.config, shape), num_hot_tokens)

    def start(self, target: PreTrainedModel, statistics: TargetStatistics) -> None:
        """Start from the target's output layer, cut to the draft's width."""
        self.model = build_draft(target, self.config, statistics)
        size = self.config.vocab_size
        mass = statistics.token_weights
        self.core = mass.topk(min(self.options.core_rows or size, size)).indices
        self.hot_token_ids = None
        if self.num_hot_tokens:
            number = min(self.num_hot_tokens, size)
            self.hot_token_ids = statistics.likeliest(number)

    def batches(self, cache: TeacherCache, rows: list[int]) -> TeacherBatches:
        """Whole conversations."""
        return BatchDataset(cache, rows, self.options.batch_tokens)

    def special_groups(self) -> list[dict[str, Any]]:
        """The embedding, which starts from the target's."""
        embedding = self.model.model.embed_tokens.weight
        lr = self.options.embedding_lr
        return [{"params": [embedding], "lr": lr, "weight_decay": 0.0}]

    def loss(
        self, inputs: dict[str, Tensor], progress: float, generator: torch.Generator
    ) -> Tensor:
        """``topk_kl``, over a part of the vocabulary except near the end."""
        hidden, targets = self._hidden(inputs), TeacherTargets.of(inputs)
        weight = self.model.lm_head.weight
        vocab_rows = None
        exact = progress >= 1 - self.options.exact_share
        if len(self.core) < len(weight) and not exact:
            vocab_rows = choose_vocab_rows(
                self.core.to(weight.device),
                targets,
                self.options.sampled_rows,
                len(weight),
                generator,
            )
        return topk_kl(hidden, weight, targets, vocab_rows, torch.bfloat16)

    def quality(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        """Quality of the batch's positions."""
        weight = self.model.lm_head.weight
        found = quality_of(self._hidden(inputs), weight, TeacherTargets.of(inputs))
        top1 = (found.rank == 0).float()
        return {"kl": found.kl, "top1": top1, "acceptance": found.acceptance}

    def _hidden(self, inputs: dict[str, Tensor]) -> Tensor:
        """Return the final hidden state, float32 [num_positions, hidden_size]."""
        tokens = inputs["input_ids"]
        with torch.autocast(tokens.device.type, dtype=torch.bfloat16):
            output = self.model.model(input_ids=tokens, use_cache=False)
        return output.last_hidden_state.flatten(0, 1)[inputs["flat_positions"]].float()

    def description(self) -> dict[str, Any]:
        """The shape."""
        sizes = asdict(self.shape).items()
        return {name.removeprefix("num_"): size for name, size in sizes}

    def record(self, evaluation: TeacherBatches) -> dict[str, Any]:
        """Shape and options."""
        return {"shape": asdict(self.shape), "draft": asdict(self.options)}

    def save(self, folder: Path) -> None:
        """Write config, bfloat16 safetensors and hot_tokens.json."""
        draft = self.model.to(torch.bfloat16)
        draft.config.dtype = "bfloat16"
        draft.config.use_cache = True  # the Trainer switches it off
        draft.save_pretrained(folder)
        if self.hot_token_ids is not None:
            hot = json.dumps(self.hot_token_ids.tolist())
            (folder / "hot_tokens.json").write_text(f"{hot}\n")


def draft_config(target: PretrainedConfig, shape: DraftShape) -> LlamaConfig:
    """Return the draft model's config: the target's vocabulary, positions and rope.

    Raises:
        ValueError: the target scales its rotary positions, which is not supported.
    """
    rope = dict(target.rope_parameters)
    if rope.get("rope_type", "default") != "default":
        raise ValueError(
            f"rope_parameters.rope_type={rope['rope_type']!r} of the target is not"
            " supported for a draft model: use a target with rope_type 'default'"
        )
    return LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=target.vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=target.max_position_embeddings,
        rope_parameters={"rope_type": "default", "rope_theta": rope["rope_theta"]},
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        bos_token_id=target.bos_token_id,
        eos_token_id=target.eos_token_id,
        pad_token_id=target.pad_token_id,
        use_cache=True,
    )


def project_embedding(
    embedding: Tensor, statistics: TargetStatistics, hidden_size: int
) -> Tensor:
    """Cut the target's output embedding down to ``hidden_size`` columns.

    Weighted PCA: the columns span the space in which the error of the logits,
    ``sum_v weight[v] * E_x (embedding[v] @ x - D[v] @ y(x))^2``, is least, where y(x)
    is the best linear image of the target's hidden state x. The weighted mean row is
    taken off first: it moves all logits of a position alike. Columns are scaled by the
    inverse square root of their singular value. That is half way between logits, whose
    first directions would be far larger than the outputs of fresh layers, and whitened
    rows, whose directions are all of one size.

    Args:
        embedding: float [vocab_size, target_hidden].

    Returns:
        float32 [vocab_size, hidden_size].
    """
    # float64 from here to the eigenvectors: the spectrum spans many decades.
    weights = statistics.token_weights.double()
    centred = embedding.double() - weights @ embedding.double()
    values, vectors = torch.linalg.eigh(statistics.hidden_moment.double())
    root = vectors * values.clamp_min(0).sqrt() @ vectors.T
    whitened = centred @ root
    gram = whitened.T @ (weights[:, None] * whitened)
    squares, directions = torch.linalg.eigh(gram)
    kept = squares.flip(0)[:hidden_size].clamp_min(torch.finfo(torch.float64).tiny)
    return (whitened @ directions.flip(1)[:, :hidden_size] / kept**0.25).float()


def build_draft(
    target: PreTrainedModel, config: LlamaConfig, statistics: TargetStatistics
) -> LlamaForCausalLM:
    """Return a float32 draft model: projected embedding, fresh layers.

    The embedding is scaled to ``EMBEDDING_RMS``; with norm weights of 1 fresh layers
    then give logits of standard deviation ``EMBEDDING_RMS * hidden_size ** 0.5``.
    """
    draft = LlamaForCausalLM(config).float()
    # The statistics are on the CPU, whatever device the target is on.
    head = target.get_output_embeddings().weight.detach().cpu()
    embedding = project_embedding(head, statistics, config.hidden_size)
    scale = EMBEDDING_RMS / embedding.pow(2).mean().sqrt()
    with torch.no_grad():
        draft.model.embed_tokens.weight.copy_(embedding * scale)
    return draft
