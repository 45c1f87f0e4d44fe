"""How the memory that a device has for KV is shared out: blocks, forks, features."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class BlockBytes:
    """What KV blocks take on one device, in bytes.

    Attributes:
        kv: keys and values of one block, of the layers of one KV cache group; where
            there is one group that is all layers, also those of drafters.
        features: what is kept beside each block of the scheduler.
        num_fork_blocks: blocks of draft trees, which the scheduler does not know, of
            all groups.

    """

    kv: int
    features: int
    num_fork_blocks: int

    @property
    def forks(self) -> int:
        """Keys and values of all fork blocks."""
        return self.kv * self.num_fork_blocks

    def for_scheduler(self, available: int) -> int:
        """Bytes to report to vLLM, which divides them by ``kv``.

        Args:
            available: bytes for blocks, forks and features together.

        Raises:
            ValueError: the fork blocks leave nothing.

        """
        if self.forks >= available:
            raise ValueError(
                f"fork blocks of draft trees need {self.forks / 2**30:.2f} GiB of the "
                f"{available / 2**30:.2f} GiB for KV cache; lower 'max_trees' or the "
                "tree in speculative_config, or --block-size, or give more KV memory"
            )
        return (available - self.forks) * self.kv // (self.kv + self.features)
