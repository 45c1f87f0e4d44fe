"""Batches of whole conversations, formed once, read from the teacher's cache."""

import random

import torch
from torch import Tensor
from torch.utils.data import Dataset

from vllm_treespec.train.teacher import TeacherCache, length_buckets, pad_right

# Rows are shuffled, then cut into pools of this many batches; only inside a pool are
# rows put together by length, so that no batch holds the short answers alone.
_POOL = 16


def split_rows(
    cache: TeacherCache, eval_share: float, seed: int, text_share: float = 1.0
) -> tuple[list[int], list[int]]:
    """Return (training rows, evaluation rows); at least one row is for evaluation.

    Rows that answer the same question stay together. ``text_share`` of the questions
    that are not for evaluation are trained on; evaluation rows do not depend on it.
    """
    starts, bounds = cache.row_starts.long(), cache.row_bounds()
    groups: dict[bytes, list[int]] = {}
    for row in range(cache.num_rows):
        first = bounds[row]
        end = starts[row + 1]
        if first < bounds[row + 1]:
            end = cache.positions[first] + 1
        question = cache.token_ids[starts[row] : end].numpy().tobytes()
        groups.setdefault(question, []).append(row)
    order = random.Random(seed).sample(list(groups.values()), len(groups))
    num_eval = max(1, round(len(order) * eval_share))
    num_train = max(1, round((len(order) - num_eval) * text_share))
    training = order[num_eval : num_eval + num_train]
    evaluation = [row for group in order[:num_eval] for row in group]
    return [row for group in training for row in group], evaluation


def pooled_batches(
    lengths: list[int], rows: list[int], batch_tokens: int
) -> list[list[int]]:
    """Put rows alike in length together, inside pools of a few batches.

    Args:
        lengths: of all rows of a cache.
        rows: in the order to batch them.
        batch_tokens: tokens of a batch, padding included.
    """
    mean = sum(lengths) / len(lengths)
    pool = max(1, round(_POOL * batch_tokens / mean))
    batches: list[list[int]] = []
    for begin in range(0, len(rows), pool):
        part = rows[begin : begin + pool]
        buckets = length_buckets([lengths[row] for row in part], batch_tokens)
        batches += [[part[i] for i in bucket] for bucket in buckets]
    return batches


class BatchDataset(Dataset):
    """Each item is one batch, ready for the draft model.

        input_ids  int64 [num_rows, longest], padded on the right
        flat_positions int64 [num_positions], supervised positions of the flat input_ids
        ids, probs, rest    as ``loss.TeacherTargets``

    Args:
        rows: row numbers of the cache, in the order to batch them.
        batch_tokens: tokens of a batch, padding included.
    """

    def __init__(self, cache: TeacherCache, rows: list[int], batch_tokens: int) -> None:
        self.cache = cache
        starts = cache.row_starts.long()
        self.bounds = cache.row_bounds()
        self.starts = starts.tolist()
        lengths = (starts[1:] - starts[:-1]).tolist()
        self.batches = pooled_batches(lengths, rows, batch_tokens)

    def __len__(self) -> int:
        return len(self.batches)

    @property
    def num_positions(self) -> int:
        """Supervised positions in all batches."""
        rows = (row for batch in self.batches for row in batch)
        return sum(self.bounds[row + 1] - self.bounds[row] for row in rows)

    def __getitem__(self, number: int) -> dict[str, Tensor]:
        rows = self.batches[number]
        tokens = [
            self.cache.token_ids[self.starts[row] : self.starts[row + 1]].long()
            for row in rows
        ]
        input_ids = pad_right(tokens)
        index, places = [], []
        for line, row in enumerate(rows):
            inside = torch.arange(self.bounds[row], self.bounds[row + 1])
            index.append(inside)
            shift = line * input_ids.shape[1] - self.starts[row]
            places.append(self.cache.positions[inside].long() + shift)
        targets = self.cache.targets(torch.cat(index))
        return {
            "input_ids": input_ids,
            "flat_positions": torch.cat(places),
            "ids": targets.ids,
            "probs": targets.probs,
            "rest": targets.rest,
        }
