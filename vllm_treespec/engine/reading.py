"""Which committed tokens the draft models have read, and which they read next."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np


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

    def written(self, table: np.ndarray, first: np.ndarray, end: np.ndarray) -> None:
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

    def read(self, table: np.ndarray, first: np.ndarray, end: np.ndarray) -> None:
        """The draft models read tokens ``first`` to ``end``; arguments as above."""
        rows, columns = self._blocks(first, end)
        last = np.minimum(end[rows] - columns * self.block_size, self.block_size)
        blocks = table[rows, columns]
        np.maximum.at(self.num_read, blocks, last)

    def first_unread(self, blocks: np.ndarray, end: int) -> int:
        """First of a request's tokens before ``end`` that has not been read, or end."""
        num_blocks = -(-end // self.block_size)
        filled = np.minimum(
            end - np.arange(num_blocks) * self.block_size, self.block_size
        )
        short = np.flatnonzero(self.num_read[blocks[:num_blocks]] < filled)
        if not len(short):
            return end
        return int(short[0] * self.block_size + self.num_read[blocks[short[0]]])

    def _blocks(
        self, first: np.ndarray, end: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Request and block column of every block with a token in the ranges."""
        column = first // self.block_size
        counts = np.maximum(-(-end // self.block_size) - column, 0)
        counts = np.where(end > first, counts, 0)
        rows = np.repeat(np.arange(len(first)), counts)
        starts = np.cumsum(counts) - counts
        return rows, np.arange(len(rows)) - starts[rows] + column[rows]


@dataclass
class ReadingPlan:
    """What the draft models read in one step: ranges of tokens, within a budget.

    A request that the budget does not let catch up reads a part, and drafts later.
    """

    marks: ReadMarks
    # tokens one step may read
    num_left: int
    # requests that may still draft in this step
    num_drafting_left: int
    reqs: list[int] = field(default_factory=list)
    first: list[int] = field(default_factory=list)
    end: list[int] = field(default_factory=list)
    # which of ``reqs`` draft; these read their root too
    drafting: list[int] = field(default_factory=list)

    def add(self, req: int, blocks: np.ndarray, end: int, drafts: bool) -> None:
        """Let a request read up to ``end``, and its root behind it if it drafts."""
        drafts = drafts and self.num_drafting_left > 0
        first = self.marks.first_unread(blocks, end)
        wanted = end + drafts - first
        taken = min(wanted, self.num_left)
        if taken <= 0:
            return
        if drafts and taken == wanted:
            self.drafting.append(len(self.reqs))
            self.num_drafting_left -= 1
        self.reqs.append(req)
        self.first.append(first)
        self.end.append(first + taken)
        self.num_left -= taken

    def mark(self, table: np.ndarray) -> None:
        """Note what will be read; ``table`` int32 [len(reqs), max_blocks].

        Roots are not noted: the target has not computed them, and their KV may lie in
        a fork block.
        """
        end = np.array(self.end, dtype=np.int64)
        end[self.drafting] -= 1
        self.marks.read(table, np.array(self.first, dtype=np.int64), end)
