"""The target's hidden states of committed tokens: until they are read, and after."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from vllm_treespec.host_copies import on_device

# Tokens whose hidden states wait at most until something is made of them.
MAX_WAITING = 256


class WaitingStates:
    """Hidden states by KV slot, which wait until something is made of them.

    Of one token that takes as long as of a hundred.
    """

    def __init__(self) -> None:
        """Begin without any."""
        self.parts: list[tuple[np.ndarray, Tensor]] = []
        self.num_tokens = 0

    @property
    def is_full(self) -> bool:
        """Whether as many tokens wait as may."""
        return self.num_tokens >= MAX_WAITING

    def add(self, places: np.ndarray, states: Tensor) -> None:
        """Add tokens, whose states are not changed afterwards.

        Args:
            places: int64 [1 or more, n], the tokens' KV slots, each once, and what else
                is told of them.
            states: [n, -1], on the device.

        """
        self.parts.append((places, states))
        self.num_tokens += places.shape[1]

    def take(self) -> tuple[Tensor, Tensor]:
        """Take out all tokens, of two in one slot the later one.

        Returns:
            what ``add`` was told, int64 [1 or more, n], on the states' device; the
            states, [n, -1].

        """
        if len(self.parts) == 1:
            ((places, states),) = self.parts
        else:
            places = np.concatenate([places for places, _ in self.parts], axis=1)
            states = torch.cat([states for _, states in self.parts])
        self.parts.clear()
        self.num_tokens = 0
        _, from_last = np.unique(places[0, ::-1], return_index=True)
        rows = places.shape[1] - 1 - from_last
        if len(rows) == places.shape[1]:
            return on_device(places, states.device), states
        told = np.concatenate([rows[None], places[:, rows]])
        kept = on_device(told, states.device)
        return kept[1:], states[kept[0]]


class FeatureStore:
    """One feature for every KV slot of the scheduler's blocks.

    Blocks carry their tokens' features with them: through steps without trees, prefix
    caching and preemption. Features are made of hidden states when they are read, or
    when many wait.
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
        self.waiting = WaitingStates()

    def keep(self, slots: np.ndarray, states: Tensor) -> None:
        """Keep the hidden states of tokens, which are not changed afterwards.

        Args:
            slots: int64 [n], the tokens' KV slots, each once.
            states: [n, -1], on the device.

        """
        self.waiting.add(slots[None], states)
        if self.waiting.is_full:
            self.write()

    def write(self) -> None:
        """Make the features that wait."""
        if self.waiting.num_tokens:
            (slots,), states = self.waiting.take()
            self.features.index_copy_(0, slots, self.make(states))

    def read(self, slots: Tensor) -> Tensor:
        """Features of the tokens in these slots, int64 [n]; [n, size]."""
        self.write()
        return self.features.index_select(0, slots)


def block_bytes(block_size: int, size: int, dtype: torch.dtype) -> int:
    """Bytes that the features of one block's tokens take."""
    return block_size * size * dtype.itemsize
