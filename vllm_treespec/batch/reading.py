"""Which committed tokens draft models have read, and which they read next."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


def token_places(first: np.ndarray, end: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Request and position of every token from ``first`` to ``end`` (exclusive).

    Args:
        first: int64 [num_reqs].
        end: int64 [num_reqs].

    Returns:
        int64 [sum of end - first], both.

    """
    lens = end - first
    if (lens == 1).all():
        return np.arange(len(lens)), first
    reqs = np.repeat(np.arange(len(lens)), lens)
    starts = np.cumsum(lens) - lens
    return reqs, np.arange(lens.sum()) - starts[reqs] + first[reqs]


def kv_slots(
    table: np.ndarray, reqs: np.ndarray, positions: np.ndarray, block_size: int
) -> np.ndarray:
    """KV slots of tokens, int64 [n].

    Args:
        table: int32 [num_reqs, max_blocks].
        reqs: int64 [n], rows of the table.
        positions: int64 [n].
        block_size: tokens of a block.

    """
    blocks = table[reqs, positions // block_size].astype(np.int64)
    return blocks * block_size + positions % block_size


class ReadMarks:
    """For every KV block, how many of its leading tokens the draft models have read.

    The draft models' KV lies in the target's blocks, but they need not read a token in
    the step in which the target does: while no trees are drawn they read nothing, and
    catch up later. Blocks change owners and are shared by prefix caching; what was
    read belongs to the block.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.num_read = np.zeros(num_blocks, dtype=np.int64)

    def mark_written(
        self, table: np.ndarray, first: np.ndarray, end: np.ndarray
    ) -> None:
        """The target wrote tokens ``first`` to ``end`` (exclusive) of each request.

        Args:
            table: int32 [num_reqs, max_blocks].
            first: int64 [num_reqs].
            end: int64 [num_reqs].

        """
        rows, columns = self._blocks(first, end)
        start = np.maximum(first[rows] - columns * self.block_size, 0)
        blocks = table[rows, columns]
        np.minimum.at(self.num_read, blocks, start)

    def mark_read(self, table: np.ndarray, first: np.ndarray, end: np.ndarray) -> None:
        """The draft models read tokens ``first`` to ``end``; arguments as above."""
        rows, columns = self._blocks(first, end)
        last = np.minimum(end[rows] - columns * self.block_size, self.block_size)
        blocks = table[rows, columns]
        np.maximum.at(self.num_read, blocks, last)

    def first_unread(self, table: np.ndarray, end: np.ndarray) -> np.ndarray:
        """First token before ``end`` that was not read, else ``end``, int64 [num_reqs].

        Args:
            table: int32 [num_reqs, max_blocks].
            end: int64 [num_reqs].

        """
        if not len(end):
            return end
        num_blocks = -(-end.max() // self.block_size)
        starts = np.arange(num_blocks) * self.block_size
        filled = np.clip(end[:, None] - starts, 0, self.block_size)
        num_read = self.num_read[table[:, :num_blocks]]
        short = num_read < filled
        if not short.any():
            return end
        column = short.argmax(axis=1)
        reqs = np.arange(len(end))
        unread = column * self.block_size + num_read[reqs, column]
        return np.where(short[reqs, column], unread, end)

    def _blocks(
        self, first: np.ndarray, end: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Request and block column of every block with a token in the ranges."""
        column = first // self.block_size
        if (end - first == 1).all():
            return np.arange(len(first)), column
        counts = np.maximum(-(-end // self.block_size) - column, 0)
        counts = np.where(end > first, counts, 0)
        rows = np.repeat(np.arange(len(first)), counts)
        starts = np.cumsum(counts) - counts
        return rows, np.arange(len(rows)) - starts[rows] + column[rows]


@dataclass(frozen=True)
class ReadingPlan:
    """What draft models read in one step: ranges of tokens, and who drafts then."""

    # int64 [num_reading], places in the batch
    reqs: np.ndarray
    # int64 [num_reading], exclusive; the roots of drafting requests lie at ``end``
    first: np.ndarray
    end: np.ndarray
    # int64 [num_drafting], which of the reading requests draft, ascending
    drafting: np.ndarray


def plan_reading(
    reqs: np.ndarray,
    first: np.ndarray,
    end: np.ndarray,
    may_draft: np.ndarray,
    max_tokens: int,
    max_trees: int,
    is_behind: np.ndarray,
) -> ReadingPlan:
    """Share out the tokens that one step may read; who is not behind comes first.

    A request that the budget does not let catch up reads a part, and drafts later. A
    request that drafts reads its root besides.

    Args:
        reqs: int64 [n], places in the batch.
        first: int64 [n], first token that was not read.
        end: int64 [n], tokens that can be read, exclusive.
        may_draft: bool [n].
        max_tokens: tokens that one step may read.
        max_trees: requests that may draft in one step.
        is_behind: bool [n], which of them have not read tokens of earlier steps. They
            read in their order, after the others.

    """
    drafts = may_draft & (np.cumsum(may_draft) <= max_trees)
    wanted = end - first + drafts
    order = np.argsort(is_behind, kind="stable")
    in_order = wanted[order]
    taken = np.empty_like(wanted)
    left = max_tokens - (np.cumsum(in_order) - in_order)
    taken[order] = np.clip(left, 0, in_order)
    drafts &= taken == wanted
    reading = np.flatnonzero(taken)
    return ReadingPlan(
        reqs=reqs[reading],
        first=first[reading],
        end=(first + taken - drafts)[reading],
        drafting=np.flatnonzero(drafts[reading]),
    )
