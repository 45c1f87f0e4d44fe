"""Stage 3: the draft model learns the target's cached distributions."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from vllm_treespec.train.batches import BatchDataset, split_rows
from vllm_treespec.train.distill import (
    DistillOptions,
    DistillTrainer,
    run_training,
    targets_of,
)
from vllm_treespec.train.loss import agreement, choose_vocab_rows, topk_kl
from vllm_treespec.train.teacher import TeacherCache


@dataclass(frozen=True)
class DraftOptions(DistillOptions):
    """How the draft model is trained.

    Attributes:
        embedding_lr: peak learning rate of the tied embedding, which starts from the
            target's.
        batch_tokens: tokens of one step, padding included.
        core_rows: likeliest tokens whose logits every step computes; 0 = all tokens.
        sampled_rows: others drawn per step, see ``loss.choose_vocab_rows``.
        exact_share: last share of the steps, in which all logits are computed.
    """

    embedding_lr: float = 1e-3
    batch_tokens: int = 4096
    core_rows: int = 8192
    sampled_rows: int = 3072
    exact_share: float = 0.1


class DraftTrainer(DistillTrainer):
    """Trainer whose loss is ``topk_kl`` and whose evaluation is ``agreement``.

    Args:
        core: int64 [core_rows], the target's likeliest tokens.
        arguments: those of ``DistillTrainer``.
    """

    options: DraftOptions

    def __init__(self, core: Tensor, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.core = core.to(self.args.device)

    def special_groups(self) -> list[dict[str, Any]]:
        """The embedding, with its own learning rate."""
        embedding = self.model.model.embed_tokens.weight
        lr = self.options.embedding_lr
        return [{"params": [embedding], "lr": lr, "weight_decay": 0.0}]

    def compute_loss(
        self,
        model: Any,
        inputs: dict[str, Tensor],
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Tensor:
        """Return the mean loss of one batch; ``inputs`` as ``BatchDataset`` items."""
        hidden = self._hidden(model, inputs)
        targets = targets_of(inputs)
        weight = model.lm_head.weight
        vocab_rows = None
        step = self.state.global_step
        exact_from = self.state.max_steps * (1 - self.options.exact_share)
        if len(self.core) < len(weight) and step < exact_from:
            # Seeded by the step: a resumed run draws what an uncut one would.
            generator = torch.Generator().manual_seed(self.options.seed + step)
            vocab_rows = choose_vocab_rows(
                self.core, targets, self.options.sampled_rows, len(weight), generator
            )
        return topk_kl(hidden, weight, targets, vocab_rows, torch.bfloat16)

    def quality(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        """``agreement`` of the batch's positions."""
        hidden = self._hidden(self.model, inputs)
        return agreement(hidden, self.model.lm_head.weight, targets_of(inputs))

    def _hidden(self, model: Any, inputs: dict[str, Tensor]) -> Tensor:
        """Return the final hidden state, float32 [num_positions, hidden_size]."""
        with torch.autocast(self.args.device.type, dtype=torch.bfloat16):
            output = model.model(input_ids=inputs["input_ids"], use_cache=False)
        return output.last_hidden_state.flatten(0, 1)[inputs["flat_positions"]].float()


def train_draft(
    draft: LlamaForCausalLM, cache: TeacherCache, folder: Path, options: DraftOptions
) -> dict[str, Any]:
    """Train ``draft`` in place; see ``distill.run_training``.

    Returns:
        ``run_training``'s result and ``positions`` (supervised positions seen).

    Raises:
        ValueError: ``folder`` holds checkpoints of a run with other options.
    """
    train_rows, eval_rows = split_rows(
        cache, options.eval_share, options.seed, options.text_share
    )
    train_set = BatchDataset(cache, train_rows, options.batch_tokens)
    eval_set = BatchDataset(cache, eval_rows, options.batch_tokens)
    mass = cache.statistics.token_weights
    core = mass.topk(min(options.core_rows or len(mass), len(mass))).indices
    config = draft.config
    result = run_training(
        DraftTrainer,
        draft,
        (train_set, eval_set),
        folder,
        options,
        {
            "hidden_size": config.hidden_size,
            "layers": config.num_hidden_layers,
            "heads": config.num_attention_heads,
            "head_dim": config.head_dim,
            "intermediate_size": config.intermediate_size,
        },
        core=core,
    )
    positions = round(train_set.num_positions * result["steps"] / len(train_set))
    return {**result, "positions": positions}
