"""Tensor-parallel ranks compare the trees that each of them has drawn.

Drafts do not travel on the V2 runner: every rank draws its own, which are the same
unless devices differ. Ranks with other trees would compute nonsense together.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple
from zlib import crc32

import torch
from torch import Tensor
from torch.distributed import ReduceOp, Work, all_reduce
from vllm.distributed import get_tp_group

from vllm_treespec.step.decoder import RanksDiffer

if TYPE_CHECKING:
    from vllm_treespec.batch.matching import Proposal


class Comparison(NamedTuple):
    """A comparison that is under way."""

    work: Work
    # int64 [2], the highest checksum of all ranks, and the highest negative one
    highest: Tensor


class RankCheck:
    """Compares checksums of the ranks' trees while a step runs, and looks at the next.

    So no step waits for it.
    """

    def __init__(self) -> None:
        """Take the ranks of this engine."""
        self.group = get_tp_group()
        self.under_way: Comparison | None = None

    def compare(self, proposal: Proposal, step: int) -> None:
        """Compare the trees of a step that begins; every rank calls it.

        Args:
            proposal: the trees.
            step: its number.

        Raises:
            RanksDiffer: those of the call before differed.

        """
        if self.group.world_size == 1:
            return
        if self.under_way is not None:
            self.under_way.work.wait()
            highest, lowest = self.under_way.highest.tolist()
            if highest != -lowest:
                raise RanksDiffer(
                    "the tensor-parallel ranks drew different draft trees; give every "
                    "rank the same kind of device, or remove speculative_config"
                )
        number = checksum(proposal, step)
        values = torch.tensor([number, -number])
        work = all_reduce(values, ReduceOp.MAX, self.group.cpu_group, async_op=True)
        self.under_way = Comparison(work, values)


def checksum(proposal: Proposal, step: int) -> int:
    """A number that hardly two different proposals share, 32 bits."""
    number = crc32(step.to_bytes(8, "little"))
    for part in (proposal.slots, proposal.token_ids, proposal.parents):
        number = crc32(part.tobytes(), number)
    return number
