"""Draft models catch up with exactly what they have not read."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("vllm", reason="the engine layer imports vLLM")

from vllm_treespec.engine.reading import ReadingPlan, ReadMarks

BLOCK = 4


def ints(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int64)


def test_reading_goes_on_where_it_stopped() -> None:
    """Red when draft models skip tokens, or read all of a context again and again."""
    marks = ReadMarks(8, BLOCK)
    table = np.array([[3, 5, 1]])
    assert marks.first_unread(table[0], 10) == 0
    marks.written(table, ints(0), ints(6))
    marks.read(table, ints(0), ints(6))
    assert marks.first_unread(table[0], 6) == 6
    assert marks.first_unread(table[0], 10) == 6
    marks.written(table, ints(6), ints(7))
    assert marks.first_unread(table[0], 7) == 6
    marks.read(table, ints(6), ints(7))
    assert marks.first_unread(table[0], 7) == 7


def test_blocks_that_change_owner_are_unread() -> None:
    """Red when a new request inherits what was read for the block's last owner."""
    marks = ReadMarks(8, BLOCK)
    marks.read(np.array([[2, 3]]), ints(0), ints(8))
    marks.written(np.array([[3, 2]]), ints(0), ints(5))
    assert marks.first_unread(np.array([3, 2]), 5) == 0


def test_shared_prefix_is_read_once() -> None:
    """Red when a prefix-cache hit is read again, or counted as read when it is not."""
    marks = ReadMarks(8, BLOCK)
    marks.read(np.array([[2, 3]]), ints(0), ints(8))
    other = np.array([2, 3, 6])
    marks.written(other[None], ints(8), ints(10))
    assert marks.first_unread(other, 10) == 8
    never_read = np.array([2, 7, 6])
    assert marks.first_unread(never_read, 10) == 4


def test_plan_keeps_its_budget() -> None:
    """Red when a long context is read in one go, or drafts without being read."""
    marks = ReadMarks(64, BLOCK)
    plan = ReadingPlan(marks, num_left=20, num_drafting_left=8)
    tables = np.arange(60).reshape(3, 20)
    plan.add(0, tables[0], 9, drafts=True)
    plan.add(4, tables[1], 30, drafts=True)
    plan.add(7, tables[2], 3, drafts=True)
    assert (plan.reqs, plan.first, plan.end) == ([0, 4], [0, 0], [10, 10])
    assert plan.drafting == [0]
    plan.mark(tables[:2])
    assert marks.first_unread(tables[0], 9) == 9, "its root is not noted"
    assert marks.first_unread(tables[1], 30) == 10


def test_plan_limits_the_number_of_trees() -> None:
    """Red when more requests draft than there are fork blocks for."""
    plan = ReadingPlan(ReadMarks(64, BLOCK), num_left=100, num_drafting_left=1)
    plan.add(0, np.arange(4), 3, drafts=True)
    plan.add(1, np.arange(4, 8), 3, drafts=True)
    plan.add(2, np.arange(8, 12), 3, drafts=False)
    assert plan.end == [4, 3, 3]
    assert plan.drafting == [0]
