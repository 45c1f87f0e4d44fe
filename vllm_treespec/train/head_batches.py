"""Batches for heads: positions with their hidden state and the tokens that follow."""

import random

import torch
from torch import Tensor
from torch.utils.data import Dataset

from vllm_treespec.sources.base import FINAL_LAYER
from vllm_treespec.train.teacher import TeacherCache


class HeadDataset(Dataset):
    """Each item is one batch of positions, ready for a head.

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
        if not cache.states.has(FINAL_LAYER):
            raise ValueError("the teacher's cache holds no final hidden states")
        self.cache = cache
        self.depth = depth
        self.bounds = cache.row_bounds()
        # The last position of a row has no teacher after its token.
        trained = [r for r in rows if self.bounds[r + 1] - self.bounds[r] > 1]
        self.batches: list[list[int]] = [[]]
        size = 0
        for row in random.Random(seed).sample(trained, len(trained)):
            if size >= batch_positions:
                self.batches.append([])
                size = 0
            self.batches[-1].append(row)
            size += self.bounds[row + 1] - self.bounds[row] - 1

    def __len__(self) -> int:
        return len(self.batches)

    @property
    def num_positions(self) -> int:
        """Positions in all batches."""
        rows = (row for batch in self.batches for row in batch)
        return sum(self.bounds[row + 1] - self.bounds[row] - 1 for row in rows)

    def __getitem__(self, number: int) -> dict[str, Tensor]:
        bounds = self.bounds
        positions = self.cache.positions
        index, ends, hidden = [], [], []
        for row in self.batches[number]:
            index.append(torch.arange(bounds[row], bounds[row + 1] - 1))
            ends.append(torch.full_like(index[-1], bounds[row + 1]))
            # Positions of a row are neighbours.
            begin = int(positions[bounds[row]])
            end = begin + len(index[-1])
            hidden.append(self.cache.states.read((FINAL_LAYER,), begin, end))
        first = torch.cat(index)
        after = first[:, None] + 1 + torch.arange(self.depth)
        supervised = after < torch.cat(ends)[:, None]
        # The teacher's next position is the next token's; beyond the row's end any
        # token will do.
        places = positions[after.clamp(max=len(positions) - 1)].long()
        targets = self.cache.targets(after[supervised])
        return {
            "hidden": torch.cat(hidden),
            "token_ids": self.cache.token_ids[places].long(),
            "supervised": supervised,
            "ids": targets.ids,
            "probs": targets.probs,
            "rest": targets.rest,
        }
