"""The blocks of running requests on the host, in the group of draft sources."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


class HostBlocks:
    """Block ids by the runner's own row of a request; vLLM has them on the device."""

    def __init__(self, max_num_reqs: int, max_num_blocks: int) -> None:
        """Allocate rows for all requests that may run."""
        # int32 [max_num_reqs, max_num_blocks]
        self.table = np.zeros((max_num_reqs, max_num_blocks), dtype=np.int32)
        # int64 [max_num_reqs]
        self.num_blocks = np.zeros(max_num_reqs, dtype=np.int64)

    def start(self, row: int, block_ids: Sequence[int]) -> None:
        """Note the blocks of a request that begins, or goes on after a preemption."""
        self.num_blocks[row] = 0
        self.append(row, block_ids)

    def append(self, row: int, block_ids: Sequence[int]) -> None:
        """Note further blocks of a request."""
        begin = self.num_blocks[row]
        end = begin + len(block_ids)
        self.table[row, begin:end] = block_ids
        self.num_blocks[row] = end
