"""Batches for heads with context: whole conversations, features read from disk."""

import torch
from torch import Tensor
from torch.utils.data import Dataset

from vllm_treespec.train.batches import pooled_batches
from vllm_treespec.train.teacher import TeacherCache, pad_right


class ContextDataset(Dataset):
    """Each item is one batch of conversations, ready for ``unrolled``.

    Pair i of a conversation is the target's hidden states of token i and token i + 1.
    It guesses token i + 2, so its teacher is the entry at token i + 1. A *supervised*
    pair is one with such an entry; those of a conversation follow each other.

        states     bfloat16 [num_rows, longest, len(layers) * target_hidden]
        token_ids  int64 [num_rows, longest + 1]
        pairs      int64 [n], supervised pairs, as row * longest + i
        left       int64 [n], supervised pairs that follow in the conversation
        ids, probs, rest    as ``loss.TeacherTargets``, one entry a supervised pair

    Args:
        rows: row numbers of the cache, in the order to batch them.
        batch_tokens: tokens of a batch, padding included.
        layers: whose hidden states are read.

    Raises:
        ValueError: the cache lacks hidden states of a layer.
    """

    def __init__(
        self,
        cache: TeacherCache,
        rows: list[int],
        batch_tokens: int,
        layers: tuple[int, ...],
    ) -> None:
        if missing := [layer for layer in layers if not cache.states.has(layer)]:
            raise ValueError(f"the teacher's cache holds no hidden states of {missing}")
        self.cache = cache
        self.layers = layers
        starts = cache.row_starts.long()
        self.starts = starts.tolist()
        self.bounds = cache.row_bounds()
        self.batches = pooled_batches(
            (starts[1:] - starts[:-1]).tolist(),
            [row for row in rows if len(self._supervised(row)[0])],
            batch_tokens,
        )

    def __len__(self) -> int:
        return len(self.batches)

    @property
    def num_positions(self) -> int:
        """Supervised pairs in all batches."""
        rows = (row for batch in self.batches for row in batch)
        return sum(len(self._supervised(row)[0]) for row in rows)

    def _supervised(self, row: int) -> tuple[Tensor, range]:
        """Supervised pairs of a conversation, and their teacher's entries."""
        entries = range(self.bounds[row], self.bounds[row + 1])
        pairs = self.cache.positions[entries.start : entries.stop].long()
        pairs = pairs - self.starts[row] - 1
        # nothing is paired with the first token
        skipped = int(len(pairs) > 0 and pairs[0] < 0)
        return pairs[skipped:], entries[skipped:]

    def __getitem__(self, number: int) -> dict[str, Tensor]:
        rows = self.batches[number]
        spans = [(self.starts[row], self.starts[row + 1]) for row in rows]
        states = [
            self.cache.states.read(self.layers, first, end - 1) for first, end in spans
        ]
        token_ids = [self.cache.token_ids[first:end].long() for first, end in spans]
        longest = max(len(row) for row in states)
        pairs, left, index = [], [], []
        for line, row in enumerate(rows):
            inside, entries = self._supervised(row)
            pairs.append(line * longest + inside)
            left.append(torch.arange(len(inside)).flip(0))
            index.append(torch.arange(entries.start, entries.stop))
        targets = self.cache.targets(torch.cat(index))
        return {
            "states": pad_right(states),
            "token_ids": pad_right(token_ids),
            "pairs": torch.cat(pairs),
            "left": torch.cat(left),
            "ids": targets.ids,
            "probs": targets.probs,
            "rest": targets.rest,
        }
