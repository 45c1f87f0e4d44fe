"""Batches of the teacher's cache, formed once, one form for each kind of drafter."""

import random

import torch
from torch import Tensor
from torch.utils.data import Dataset

from vllm_treespec.sources.base import FINAL_LAYER
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


class TeacherBatches(Dataset):
    """Each item is one batch of rows; its teacher is ``ids``, ``probs`` and ``rest``.

    Args:
        cache: of the teacher.
        layers: whose hidden states are read.

    Raises:
        ValueError: the cache lacks hidden states of a layer.

    Attributes:
        starts: where each row starts in the cache's tokens, and the last one ends.
        bounds: ``TeacherCache.row_bounds``.
        batches: the rows of each.
    """

    def __init__(self, cache: TeacherCache, layers: tuple[int, ...] = ()) -> None:
        if missing := [layer for layer in layers if not cache.states.has(layer)]:
            raise ValueError(f"the teacher's cache holds no hidden states of {missing}")
        self.cache, self.layers = cache, layers
        self.starts: list[int] = cache.row_starts.tolist()
        self.bounds = cache.row_bounds()
        self.batches: list[list[int]] = []

    def entries(self, row: int) -> range:
        """Numbers of the teacher's entries that a row is trained on."""
        return range(self.bounds[row], self.bounds[row + 1])

    def pooled(self, rows: list[int], batch_tokens: int) -> list[list[int]]:
        """Put rows alike in length together, inside pools of a few batches.

        Args:
            rows: in the order to batch them.
            batch_tokens: tokens of a batch, padding included.
        """
        mean = self.starts[-1] / self.cache.num_rows
        pool = max(1, round(_POOL * batch_tokens / mean))
        batches: list[list[int]] = []
        for begin in range(0, len(rows), pool):
            part = rows[begin : begin + pool]
            lengths = [self.starts[row + 1] - self.starts[row] for row in part]
            buckets = length_buckets(lengths, batch_tokens)
            batches += [[part[i] for i in bucket] for bucket in buckets]
        return batches

    def __len__(self) -> int:
        return len(self.batches)

    @property
    def num_positions(self) -> int:
        """Supervised positions in all batches."""
        return sum(len(self.entries(row)) for batch in self.batches for row in batch)

    def tokens(self, row: int) -> Tensor:
        """Tokens of a row, int64."""
        return self.cache.token_ids[self.starts[row] : self.starts[row + 1]].long()

    def teacher(self, index: Tensor) -> dict[str, Tensor]:
        """The teacher's entries of these numbers, as a part of an item."""
        return vars(self.cache.targets(index))


class BatchDataset(TeacherBatches):
    """Batches for a draft model: whole conversations.

        input_ids  int64 [num_rows, longest], padded on the right
        flat_positions int64 [num_positions], supervised positions of the flat input_ids
        ids, probs, rest    as ``loss.TeacherTargets``

    Args:
        rows: row numbers of the cache, in the order to batch them.
        batch_tokens: tokens of a batch, padding included.
    """

    def __init__(self, cache: TeacherCache, rows: list[int], batch_tokens: int) -> None:
        super().__init__(cache)
        self.batches = self.pooled(rows, batch_tokens)

    def __getitem__(self, number: int) -> dict[str, Tensor]:
        rows = self.batches[number]
        input_ids = pad_right([self.tokens(row) for row in rows])
        index, places = [], []
        for line, row in enumerate(rows):
            inside = torch.tensor(self.entries(row), dtype=torch.int64)
            index.append(inside)
            shift = line * input_ids.shape[1] - self.starts[row]
            places.append(self.cache.positions[inside].long() + shift)
        return {
            "input_ids": input_ids,
            "flat_positions": torch.cat(places),
            **self.teacher(torch.cat(index)),
        }


class HeadDataset(TeacherBatches):
    """Batches for heads without context: positions and the tokens that follow.

        hidden     [n, target_hidden], from which the first of ``token_ids`` came
        token_ids  int64 [n, depth], that token and those after it
        supervised  bool [n, depth], whether the teacher was asked after that token
        ids, probs, rest    as ``loss.TeacherTargets``, one row a True of ``supervised``

    Args:
        rows: row numbers of the cache; shuffled once by ``seed``.
        batch_positions: positions of a batch, at least.
        depth: levels of the head.
    """

    def __init__(
        self,
        cache: TeacherCache,
        rows: list[int],
        batch_positions: int,
        depth: int,
        seed: int,
    ) -> None:
        super().__init__(cache, (FINAL_LAYER,))
        self.depth = depth
        trained = [row for row in rows if self.entries(row)]
        size = batch_positions
        for row in random.Random(seed).sample(trained, len(trained)):
            if size >= batch_positions:
                self.batches.append([])
                size = 0
            self.batches[-1].append(row)
            size += len(self.entries(row))

    def entries(self, row: int) -> range:
        """All but the last: after its token there is no teacher."""
        return range(self.bounds[row], self.bounds[row + 1] - 1)

    def __getitem__(self, number: int) -> dict[str, Tensor]:
        positions = self.cache.positions
        index, ends, hidden = [], [], []
        for row in self.batches[number]:
            index.append(torch.tensor(self.entries(row)))
            ends.append(torch.full_like(index[-1], self.bounds[row + 1]))
            # Positions of a row are neighbours.
            begin = int(positions[self.bounds[row]])
            end = begin + len(index[-1])
            hidden.append(self.cache.states.read(self.layers, begin, end))
        first = torch.cat(index)
        after = first[:, None] + 1 + torch.arange(self.depth)
        supervised = after < torch.cat(ends)[:, None]
        # The teacher's next position is the next token's; beyond the row's end any
        # token will do.
        places = positions[after.clamp(max=len(positions) - 1)].long()
        return {
            "hidden": torch.cat(hidden),
            "token_ids": self.cache.token_ids[places].long(),
            "supervised": supervised,
            **self.teacher(after[supervised]),
        }


class ContextDataset(TeacherBatches):
    """Batches for heads with context, ready for ``unrolled``: whole conversations.

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
    """

    def __init__(
        self,
        cache: TeacherCache,
        rows: list[int],
        batch_tokens: int,
        layers: tuple[int, ...],
    ) -> None:
        super().__init__(cache, layers)
        supervised = [row for row in rows if self.entries(row)]
        self.batches = self.pooled(supervised, batch_tokens)

    def entries(self, row: int) -> range:
        """All but that of the first token, which no pair ends with."""
        found = super().entries(row)
        at_start = found and int(self.cache.positions[found.start]) == self.starts[row]
        return found[1:] if at_start else found

    def __getitem__(self, number: int) -> dict[str, Tensor]:
        rows = self.batches[number]
        spans = [(self.starts[row], self.starts[row + 1] - 1) for row in rows]
        states = [self.cache.states.read(self.layers, *span) for span in spans]
        longest = max(len(row) for row in states)
        pairs, left, index = [], [], []
        for line, row in enumerate(rows):
            index.append(torch.tensor(self.entries(row)))
            inside = self.cache.positions[index[-1]].long() - self.starts[row] - 1
            pairs.append(line * longest + inside)
            left.append(torch.arange(len(inside)).flip(0))
        return {
            "states": pad_right(states),
            "token_ids": pad_right([self.tokens(row) for row in rows]),
            "pairs": torch.cat(pairs),
            "left": torch.cat(left),
            **self.teacher(torch.cat(index)),
        }
