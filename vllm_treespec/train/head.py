"""Stage 3 for heads: a head learns the target's cached distributions."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vllm_treespec.heads import DraftHead
from vllm_treespec.heads.base import Head
from vllm_treespec.train.batches import split_rows
from vllm_treespec.train.distill import (
    DistillOptions,
    DistillTrainer,
    run_training,
    targets_of,
)
from vllm_treespec.train.head_batches import HeadDataset
from vllm_treespec.train.loss import (
    LOGITS_CHUNK,
    TeacherTargets,
    VocabRows,
    in_columns,
    position_loss,
    topk_kl,
)
from vllm_treespec.train.teacher import TeacherCache

# Ranks whose accuracy is measured, for Medusa's static tree.
NUM_RANKS = 10


@dataclass(frozen=True)
class HeadOptions(DistillOptions):
    """How a head is trained.

    Attributes:
        batch_positions: positions of one step.
        level_share: each level is trained on this share of the positions on which the
            level above is: deeper levels are reached less often.
    """

    epochs: float = 6
    batch_positions: int = 2048
    level_share: float = 0.8
    save_steps: int = 100


def head_features(head: Any, inputs: dict[str, Tensor], wanted: Tensor) -> Tensor:
    """Wanted features of a batch, float32 [num_wanted, hidden_size].

    They are computed in bfloat16.
    """
    with torch.autocast(inputs["hidden"].device.type, dtype=torch.bfloat16):
        features: Tensor = head(inputs["hidden"], inputs["token_ids"], wanted)
    return features.float()


def draft_vocab_rows(head: Head) -> VocabRows:
    """The draft vocabulary as the rows of the output layer."""
    size = head.config.draft_vocab_size
    device = head.output.weight.device
    column = torch.full((head.config.vocab_size,), size, device=device)
    hot = head.hot_token_ids
    column[slice(None) if hot is None else hot] = torch.arange(size, device=device)
    bias = torch.zeros(size + 1, device=device)
    bias[-1] = -torch.inf
    return VocabRows(torch.arange(size, device=device), column, bias)


@dataclass(frozen=True)
class LevelQuality:
    """How well a head guesses at some positions, each [n]."""

    kl: Tensor
    # place of the target's likeliest token among the head's, at most NUM_RANKS
    rank: Tensor
    # sum of min(p, q): chance that one draft token is accepted at temperature 1
    acceptance: Tensor


# Judges a head on one batch: level of each guess, int64 [n], and their quality.
Judge = Callable[[Any, dict[str, Tensor], VocabRows], tuple[Tensor, LevelQuality]]


def level_quality(
    head: Head, features: Tensor, targets: TeacherTargets, rows: VocabRows
) -> LevelQuality:
    """Compare a head's distributions with the teacher's, in float32.

    Args:
        features: [n, width of ``output_weight``].
        targets: of the same positions.
        rows: ``draft_vocab_rows`` of the head.
    """
    kl, ranks, acceptance = [], [], []
    weight = head.output_weight().float()
    targets = in_columns(targets, rows)
    for start in range(0, len(features), LOGITS_CHUNK):
        part = slice(start, start + LOGITS_CHUNK)
        column, probs = targets.ids[part], targets.probs[part]
        logits = torch.nn.functional.linear(features[part], weight)
        logits = torch.nn.functional.pad(logits, (0, 1), value=-torch.inf)
        log_probs = logits.log_softmax(-1).gather(1, column)
        acceptance.append(torch.minimum(log_probs.exp(), probs).sum(-1))
        best = logits.gather(1, column[:, :1])
        rank = (logits > best).sum(-1)
        ranks.append(rank.masked_fill(best[:, 0] == -torch.inf, NUM_RANKS))
        kl.append(position_loss(logits, column, probs, targets.rest[part])[0])
    return LevelQuality(
        torch.cat(kl), torch.cat(ranks).clamp(max=NUM_RANKS), torch.cat(acceptance)
    )


def guessed_quality(
    head: DraftHead, inputs: dict[str, Tensor], rows: VocabRows
) -> tuple[Tensor, LevelQuality]:
    """How well a head guesses after each supervised token of a batch.

    Args:
        head: to judge.
        inputs: an item of ``HeadDataset``.
        rows: ``draft_vocab_rows`` of the head.

    Returns:
        int64 [n], level of each guess; and their quality.
    """
    supervised = inputs["supervised"]
    features = head_features(head, inputs, supervised)
    quality = level_quality(head, features, targets_of(inputs), rows)
    return supervised.nonzero()[:, 1], quality


class LevelTrainer(DistillTrainer):
    """Trainer of a head, which is measured by level.

    Attributes:
        head: that is trained.
        rows: its draft vocabulary.
        judge: says how well the head guesses in one batch.
    """

    head: Any
    judge: Judge

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.head = self.model["head"]
        self.rows = draft_vocab_rows(self.head)

    def quality(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        """``level_quality`` of the batch's guesses, by level."""
        level, quality = self.judge(self.head, inputs, self.rows)
        found = {"kl": quality.kl}
        for i in range(self.head.config.depth):
            at = level == i
            found[f"accuracy_{i + 1}"] = (quality.rank[at] == 0).float()
            found[f"acceptance_{i + 1}"] = quality.acceptance[at]
        return found


class HeadTrainer(LevelTrainer):
    """Trainer whose loss is ``topk_kl`` over the head's draft vocabulary."""

    options: HeadOptions
    head: DraftHead
    judge = staticmethod(guessed_quality)

    def compute_loss(
        self,
        model: Any,
        inputs: dict[str, Tensor],
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Tensor:
        """Return the mean loss of one batch; ``inputs`` as ``HeadDataset`` items."""
        supervised = inputs["supervised"]
        # Seeded by the step: a resumed run draws what an uncut one would.
        seed = self.options.seed + self.state.global_step
        generator = torch.Generator().manual_seed(seed)
        drawn = torch.rand(len(supervised), 1, generator=generator).to(
            supervised.device
        )
        levels = torch.arange(supervised.shape[1], device=supervised.device)
        used = supervised & (drawn < self.options.level_share**levels)
        part = used[supervised]
        targets = targets_of({k: inputs[k][part] for k in ("ids", "probs", "rest")})
        features = head_features(self.head, inputs, used)
        return topk_kl(
            features, self.head.output.weight, targets, self.rows, torch.bfloat16
        )


@torch.no_grad()
def measure(head: Head, data: Any, judge: Judge) -> dict[str, list[Any]]:
    """Measure a head by level.

    Args:
        head: to measure.
        data: dataset of batches for ``judge``.
        judge: says how well the head guesses in one batch.

    Returns:
        ``accuracies``: by level and rank, how often that guess is the target's
        likeliest token; ``acceptance``: by level, mean chance that one draft token is
        accepted at temperature 1.
    """
    rows, depth = draft_vocab_rows(head), head.config.depth
    device = head.output.weight.device
    counts = torch.zeros(depth, NUM_RANKS + 1)
    accepted = torch.zeros(depth)
    for number in range(len(data)):
        inputs = {name: value.to(device) for name, value in data[number].items()}
        level, quality = judge(head, inputs, rows)
        places = level * (NUM_RANKS + 1) + quality.rank
        counts += torch.bincount(places, minlength=counts.numel()).view(depth, -1).cpu()
        accepted.index_add_(0, level.cpu(), quality.acceptance.cpu())
    total = counts.sum(1).clamp_min(1)
    return {
        "accuracies": _rounded(counts[:, :-1] / total[:, None]),
        "acceptance": _rounded(accepted / total),
    }


def _rounded(values: Tensor) -> list[Any]:
    found: list[Any] = (values.double() * 1e4).round().div(1e4).tolist()
    return found


def train_levels(
    trainer: type[LevelTrainer],
    head: Head,
    datasets: tuple[Any, Any],
    folder: Path,
    options: DistillOptions,
) -> dict[str, Any]:
    """Train ``head`` in place; see ``distill.run_training``.

    Args:
        trainer: class of the trainer.
        head: to train.
        datasets: to train and to evaluate on.
        folder: of checkpoints.
        options: of the trainer.

    Returns:
        ``run_training``'s result, ``positions`` (seen) and ``rank_accuracies``.

    Raises:
        ValueError: ``folder`` holds checkpoints of a run with other options.
    """
    # The Trainer would write into a ``config`` that its model has.
    model = nn.ModuleDict({"head": head})
    config = head.config.model_dump(mode="json", exclude={"rank_accuracies"})
    result = run_training(trainer, model, datasets, folder, options, config)
    train_set, eval_set = datasets
    positions = round(train_set.num_positions * result["steps"] / len(train_set))
    ranks = measure(head, eval_set, trainer.judge)["accuracies"]
    return {**result, "positions": positions, "rank_accuracies": ranks}


def train_head(
    head: DraftHead, cache: TeacherCache, folder: Path, options: HeadOptions
) -> dict[str, Any]:
    """Train ``head`` in place; see ``train_levels``."""
    datasets = head_datasets(cache, head, options)
    return train_levels(HeadTrainer, head, datasets, folder, options)


def evaluate_head(head: DraftHead, cache: TeacherCache) -> dict[str, list[Any]]:
    """``measure`` a head on all rows of a cache."""
    rows = list(range(cache.num_rows))
    data = HeadDataset(cache, rows, 2048, head.config.depth, 0)
    return measure(head, data, guessed_quality)


def head_datasets(
    cache: TeacherCache, head: DraftHead, options: HeadOptions
) -> tuple[HeadDataset, HeadDataset]:
    """Training and evaluation batches; no question is in both."""
    depth = head.config.depth
    train_rows, eval_rows = split_rows(
        cache, options.eval_share, options.seed, options.text_share
    )
    size, seed = options.batch_positions, options.seed
    return (
        HeadDataset(cache, train_rows, size, depth, seed),
        HeadDataset(cache, eval_rows, size, depth, seed),
    )
