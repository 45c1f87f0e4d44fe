"""The target's features of committed tokens, kept where their KV lies."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

# Tokens whose hidden states wait at most until their features are made.
MAX_WAITING = 256


class FeatureStore:
    """One feature for every KV slot of the scheduler's blocks.

    Blocks carry their tokens' features with them: through steps without trees, prefix
    caching and preemption. Features are made of hidden states when they are read, or
    when many wait: of one token they take as long as of a hundred.
    """

    def __init__(
        self,
        num_slots: int,
        size: int,
        dtype: torch.dtype,
        device: torch.device,
        make: Callable[[Tensor], Tensor],
    ) -> None:
        """Allocate features of ``size`` numbers.

        Args:
            num_slots: KV slots.
            size: of a feature.
            dtype: of features.
            device: that they lie on.
            make: from hidden states [n, -1] to features [n, size].

        """
        self.features = torch.zeros((num_slots, size), dtype=dtype, device=device)
        self.make = make
        self.waiting: list[tuple[np.ndarray, Tensor]] = []
        self.num_waiting = 0

    def keep(self, slots: np.ndarray, states: Tensor) -> None:
        """Keep the hidden states of tokens, which are not changed afterwards.

        Args:
            slots: int64 [n], the tokens' KV slots, each once.
            states: [n, -1], on the device.

        """
        self.waiting.append((slots, states))
        self.num_waiting += len(slots)
        if self.num_waiting >= MAX_WAITING:
            self.write()

    def write(self) -> None:
        """Make the features that wait; of two for one slot the later one stays."""
        if not self.waiting:
            return
        slots = np.concatenate([slots for slots, _ in self.waiting])
        features = self.make(torch.cat([states for _, states in self.waiting]))
        self.waiting.clear()
        self.num_waiting = 0
        rows = last_of_slots(slots)
        index = torch.from_numpy(np.stack([rows, slots[rows]])).to(features.device)
        self.features.index_copy_(0, index[1], features[index[0]])

    def read(self, slots: Tensor) -> Tensor:
        """Features of the tokens in these slots, int64 [n]; [n, size]."""
        self.write()
        return self.features.index_select(0, slots)


def last_of_slots(slots: np.ndarray) -> np.ndarray:
    """Where each slot, of int64 [n], stands last; int64 [num_slots]."""
    _, from_last = np.unique(slots[::-1], return_index=True)
    return len(slots) - 1 - from_last


def block_bytes(block_size: int, size: int, dtype: torch.dtype) -> int:
    """Bytes that the features of one block's tokens take."""
    return block_size * size * dtype.itemsize
