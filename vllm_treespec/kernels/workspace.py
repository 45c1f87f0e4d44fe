"""Memory of the tree attention kernel, and how contexts are split over programs."""

from __future__ import annotations

import math
from functools import lru_cache

import torch
from torch import Tensor

# The merge kernel holds one number per split.
MAX_SPLITS = 128
# Rows of the largest q block (block_shape in tree_attention.py).
MAX_BLOCK_ROWS = 128
# Those of an H100, for machines without a card (interpreter, compile table).
DEFAULT_MULTIPROCESSORS = 132
# Share of the best utilisation that a number of splits must reach.
GOOD_ENOUGH = 0.9


class Workspace:
    """Partial outputs of contexts that are split over programs, allocated once.

    Layers that run one after another share a workspace, whatever their shapes.

    Attributes:
        partials: float32, flat, normalised outputs [token, head, split, head_size].
        partial_lse: float32, flat, base-2 log-sum-exp [token, head, split].

    """

    def __init__(
        self,
        max_tokens: int,
        num_heads: int,
        head_size: int,
        device: torch.device | str,
        num_splits: int | None = None,
    ) -> None:
        """Allocate; at most 17 MB per 128 of head size on an H100.

        Args:
            max_tokens: most query tokens of a call.
            num_heads: query heads of a layer.
            head_size: size of a head.
            device: where the layers run.
            num_splits: splits of every context, where memory lets it; for tests and
                tuning. None: chosen by how well the grid fills the card.

        Raises:
            ValueError: no such number of splits.

        """
        if num_splits is not None and not 1 <= num_splits <= MAX_SPLITS:
            raise ValueError(
                f"num_splits is {num_splits}; give a number from 1 to {MAX_SPLITS}"
            )
        device = torch.device(device)
        self.num_splits = num_splits
        self.multiprocessors = DEFAULT_MULTIPROCESSORS
        if device.type == "cuda":
            properties = torch.cuda.get_device_properties(device)
            self.multiprocessors = properties.multi_processor_count
        # Splits fill the card twice at most: that bounds their rows, however many
        # tokens a batch has.
        rows = 2 * self.multiprocessors * MAX_BLOCK_ROWS
        rows = min(rows, max_tokens * num_heads * MAX_SPLITS)
        self.partials: Tensor = torch.empty(rows * head_size, device=device)
        self.partial_lse: Tensor = torch.empty(rows, device=device)

    def splits(
        self, programs: int, rows: int, head_size: int, per_processor: int, most: int
    ) -> int:
        """Number of splits of a call, from what the host knows of it.

        Args:
            programs: programs of the grid without splits.
            rows: query rows, tokens × heads.
            head_size: size of a head.
            per_processor: programs that run on a multiprocessor at a time.
            most: splits that the longest possible context has work for.

        """
        room = min(self.partial_lse.shape[0], self.partials.shape[0] // head_size)
        room = max(1, min(room // rows, MAX_SPLITS))
        if self.num_splits is not None:
            return min(self.num_splits, room)
        most = min(most, room)
        return fewest_good_splits(programs, self.multiprocessors * per_processor, most)


@lru_cache(maxsize=4096)
def fewest_good_splits(programs: int, places: int, most: int) -> int:
    """Fewest splits that keep a card with so many places for programs busy.

    A grid keeps the card busy but for its last wave; more splits make that shorter,
    and more partial outputs to write and read.
    """
    most = max(1, min(most, 2 * places // programs))
    waves = [programs * splits / places for splits in range(1, most + 1)]
    busy = [number / math.ceil(number) for number in waves]
    return next(n for n, b in enumerate(busy, 1) if b >= GOOD_ENOUGH * max(busy))
