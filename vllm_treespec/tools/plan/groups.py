"""KV cache groups as vLLM makes them: layers of one share blocks, all share a pool.

Layers with a window give the blocks before it back, if others see all tokens.
"""

from __future__ import annotations

import bisect
import math
from collections import Counter
from dataclasses import dataclass

# vLLM makes groups as large as the larger kind of layers up to this ratio.
ALIKE = 1.5


@dataclass(frozen=True)
class Group:
    """Layers that share blocks.

    Attributes:
        num_layers: with the same heads in each.
        window: tokens that they see; None: all.

    """

    num_layers: int
    window: int | None

    def num_blocks(self, length: int, block_size: int, num_batched: int) -> int:
        """Blocks of a request of so many tokens, of which a step reads so many."""
        if self.window is None:
            return math.ceil(length / block_size)
        kept = min(self.window - 1 + num_batched, length)
        # a window need not begin where a block does
        return math.ceil(kept / block_size) + 1


def group_layers(windows: list[int | None]) -> list[Group]:
    """Make the groups of layers with these windows, all with the same heads."""
    kinds = Counter(windows)
    fewest, most = min(kinds.values()), max(kinds.values())
    size = most if most < ALIKE * fewest else fewest
    return [
        Group(len(range(first, num_layers, num_groups)), window)
        for window, num_layers in kinds.items()
        for num_groups in [math.ceil(num_layers / size)]
        for first in range(num_groups)
    ]


@dataclass(frozen=True)
class Pool:
    """The groups that share blocks, and how long requests become.

    Attributes:
        groups: one where no layer has a window, or all keep all tokens.
        block_size: tokens of a block.
        num_batched: tokens that a step reads at most.

    """

    groups: list[Group]
    block_size: int
    num_batched: int

    def request_blocks(self, length: int) -> int:
        """Blocks that a request of so many tokens takes in all groups."""
        return sum(
            group.num_blocks(length, self.block_size, self.num_batched)
            for group in self.groups
        )

    def num_tokens(self, num_blocks: int, length: int) -> int:
        """Tokens in so many blocks, of requests of ``length`` tokens each."""
        if len(self.groups) == 1:
            return num_blocks * self.block_size
        return num_blocks * length // self.request_blocks(length)

    def longest(self, num_blocks: int, length: int) -> int:
        """The longest request of at most ``length`` tokens that fits in the blocks."""
        lengths = range(self.block_size, length + 1, self.block_size)
        fitting = bisect.bisect_right(lengths, num_blocks, key=self.request_blocks)
        return fitting * self.block_size
