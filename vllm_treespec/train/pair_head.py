"""Stage 3 for heads that read pairs: unrolled training on whole conversations."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import mse_loss, smooth_l1_loss

from vllm_treespec.heads.eagle import EagleHead
from vllm_treespec.heads.lyanna import LyannaHead
from vllm_treespec.train.batches import split_rows
from vllm_treespec.train.context_batches import ContextDataset
from vllm_treespec.train.distill import DistillOptions, targets_of
from vllm_treespec.train.head import (
    LevelQuality,
    LevelTrainer,
    level_quality,
    measure,
    train_levels,
)
from vllm_treespec.train.loss import TeacherTargets, VocabRows, topk_kl
from vllm_treespec.train.teacher import TeacherCache
from vllm_treespec.train.unrolled import unrolled


@dataclass(frozen=True)
class PairOptions(DistillOptions):
    """How a head that reads pairs is trained.

    Attributes:
        batch_tokens: tokens of one step, padding included.
        steps: drafted tokens that training unrolls; 1 is EAGLE-1's training.
        step_decay: each step counts this much of the one before.
        feature_weight: of the distance between what the head makes of a pair and the
            target's feature there: smooth L1 as EAGLE-1, or Lyanna's mean square.
        feature_noise: uniform noise on the target's features, up to this much.
        token_info_lr: peak learning rate of a Lyanna head's token info.
    """

    epochs: float = 3
    lr: float = 1e-3
    batch_tokens: int = 4096
    steps: int = 3
    step_decay: float = 0.8
    feature_weight: float = 0.0
    feature_noise: float = 0.0
    token_info_lr: float = 1e-2
    save_steps: int = 100
    evaluations: int = 5


def entries(targets: TeacherTargets, index: Tensor) -> TeacherTargets:
    """Some entries of the teacher."""
    return TeacherTargets(targets.ids[index], targets.probs[index], targets.rest[index])


def drafted_quality(
    head: EagleHead, inputs: dict[str, Tensor], rows: VocabRows
) -> tuple[Tensor, LevelQuality]:
    """How well a head guesses at each level, given the true tokens in between.

    Its features are the target's at level 0, then its own.

    Args:
        head: to measure.
        inputs: an item of ``ContextDataset``.
        rows: ``draft_vocab_rows`` of the head.

    Returns:
        int64 [n], level of each guess; and their quality.
    """
    targets, levels, outputs, index = targets_of(inputs), [], [], []
    with torch.autocast(inputs["states"].device.type, dtype=torch.bfloat16):
        features = head.features(inputs["states"].float()).float()
        steps = unrolled(head, features, inputs, head.config.depth)
        for step, (pairs, out, before) in enumerate(steps):
            levels.append(torch.full_like(pairs, step))
            outputs.append(head.output_inputs_after(out, before).float())
            index.append(pairs + step)
    wanted = entries(targets, torch.cat(index))
    return torch.cat(levels), level_quality(head, torch.cat(outputs), wanted, rows)


class PairTrainer(LevelTrainer):
    """Trainer whose loss is a weighted mean of ``topk_kl`` over the steps."""

    options: PairOptions
    head: EagleHead
    judge = staticmethod(drafted_quality)

    def special_groups(self) -> list[dict[str, Any]]:
        """The token info: it starts at next to nothing, and is to grow fast."""
        info = self.head.info if isinstance(self.head, LyannaHead) else None
        if info is None:
            return []
        rate = {"lr": self.options.token_info_lr, "weight_decay": 0.0}
        return [{"params": list(info.parameters()), **rate}]

    def compute_loss(
        self,
        model: Any,
        inputs: dict[str, Tensor],
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Tensor:
        """Return the loss of one batch; ``inputs`` as ``ContextDataset`` items."""
        options, targets = self.options, targets_of(inputs)
        noise = self._noise(inputs["states"])
        distance = mse_loss if isinstance(self.head, LyannaHead) else smooth_l1_loss
        weights, losses = [], []
        with torch.autocast(noise.device.type, dtype=torch.bfloat16):
            features = self.head.features(inputs["states"].float() + noise).float()
            wanted = features.flatten(0, 1)
            steps = unrolled(self.head, features, inputs, options.steps)
            for step, (pairs, out, before) in enumerate(steps):
                loss = topk_kl(
                    self.head.output_inputs_after(out, before).float(),
                    self.head.output.weight,
                    entries(targets, pairs + step),
                    self.rows,
                    torch.bfloat16,
                    self.head.output_columns(),
                )
                if options.feature_weight:
                    # The last supervised pair is followed by no feature.
                    place = inputs["pairs"][pairs] + 1 + step
                    near = distance(out.float(), wanted[place].detach())
                    loss = loss + options.feature_weight * near
                weights.append(options.step_decay**step)
                losses.append(weights[-1] * loss)
        return torch.stack(losses).sum() / sum(weights)

    def _noise(self, states: Tensor) -> Tensor:
        """Noise on the target's features; seeded by the step, for resumed runs."""
        if not self.options.feature_noise:
            return torch.zeros((), device=states.device)
        seed = self.options.seed + self.state.global_step
        generator = torch.Generator().manual_seed(seed)
        drawn = torch.rand(states.shape, generator=generator).to(states.device)
        return (2 * drawn - 1) * self.options.feature_noise


def train_pair_head(
    head: EagleHead, cache: TeacherCache, folder: Path, options: PairOptions
) -> dict[str, Any]:
    """Train ``head`` in place; see ``head.train_levels``.

    Raises:
        ValueError: ``folder`` holds checkpoints of a run with other options, the cache
            lacks a layer, or there is a loss on features that are trained themselves.
    """
    if options.feature_weight and head.config.combines:
        raise ValueError(
            "a loss on features needs the target's own: leave out --feature-weight,"
            " or pass --layers one"
        )
    train_rows, eval_rows = split_rows(
        cache, options.eval_share, options.seed, options.text_share
    )
    size, layers = options.batch_tokens, head.config.layers
    train_set = ContextDataset(cache, train_rows, size, layers)
    eval_set = ContextDataset(cache, eval_rows, size, layers)
    if not len(train_set) or not len(eval_set):
        raise ValueError(
            "the text has too few answers of 2 tokens or more to train and evaluate on:"
            " add text, or raise --text-share"
        )
    return train_levels(PairTrainer, head, (train_set, eval_set), folder, options)


def evaluate_pair_head(head: EagleHead, cache: TeacherCache) -> dict[str, list[Any]]:
    """``head.measure`` on all rows of a cache."""
    rows = list(range(cache.num_rows))
    data = ContextDataset(cache, rows, 4096, head.config.layers)
    return measure(head, data, drafted_quality)
