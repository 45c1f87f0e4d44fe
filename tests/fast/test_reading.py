"""Draft models catch up with exactly what they have not read."""

from __future__ import annotations

import numpy as np

from tests.fast.toy_workloads import make_method
from vllm_treespec.batch.reading import ReadMarks
from vllm_treespec.proposers import RsdS
from vllm_treespec.schedule.plan import PLAIN_PLAN, RunningRequests, StepPlan
from vllm_treespec.sources.base import Sources
from vllm_treespec.testing.fake_engine import FakeEngine
from vllm_treespec.testing.fake_scheduler import Habits, Request
from vllm_treespec.testing.toy_models import Language, ToyDraftModel

BLOCK = 4


def ints(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int64)


def first_unread(marks: ReadMarks, table: np.ndarray, end: int) -> int:
    return int(marks.first_unread(table[None], ints(end))[0])


def test_reading_goes_on_where_it_stopped() -> None:
    """Red when draft models skip tokens, or read all of a context again and again."""
    marks = ReadMarks(8, BLOCK)
    table = np.array([[3, 5, 1]])
    assert first_unread(marks, table[0], 10) == 0
    marks.mark_written(table, ints(0), ints(6))
    marks.mark_read(table, ints(0), ints(6))
    assert first_unread(marks, table[0], 6) == 6
    assert first_unread(marks, table[0], 10) == 6
    marks.mark_written(table, ints(6), ints(7))
    assert first_unread(marks, table[0], 7) == 6
    marks.mark_read(table, ints(6), ints(7))
    assert first_unread(marks, table[0], 7) == 7


def test_blocks_that_change_owner_are_unread() -> None:
    """Red when a new request inherits what was read for the block's last owner."""
    marks = ReadMarks(8, BLOCK)
    marks.mark_read(np.array([[2, 3]]), ints(0), ints(8))
    marks.mark_written(np.array([[3, 2]]), ints(0), ints(5))
    assert first_unread(marks, np.array([3, 2]), 5) == 0


def test_shared_prefix_is_read_once() -> None:
    """Red when a prefix-cache hit is read again, or counted as read when it is not."""
    marks = ReadMarks(8, BLOCK)
    marks.mark_read(np.array([[2, 3]]), ints(0), ints(8))
    other = np.array([2, 3, 6])
    marks.mark_written(other[None], ints(8), ints(10))
    assert first_unread(marks, other, 10) == 8
    never_read = np.array([2, 7, 6])
    assert first_unread(marks, never_read, 10) == 4


def test_all_requests_are_looked_up_together() -> None:
    """Red when a request gets what another one has not read."""
    marks = ReadMarks(8, BLOCK)
    marks.mark_read(np.array([[2, 3]]), ints(0), ints(6))
    tables = np.array([[2, 3], [4, 5], [2, 5]])
    assert marks.first_unread(tables, ints(7, 3, 4)).tolist() == [6, 0, 4]


def test_schedules_are_told_how_far_models_are_behind() -> None:
    """Red when a prompt, or tokens of plain steps, are no cost of asking a model."""
    language = Language(0)
    method = make_method([RsdS(2, 2)], "recursive_rejection")
    model = ToyDraftModel(language)
    engine = FakeEngine(language, method, Sources([model]), Habits())
    told: list[int] = []
    caught_up: list[float] = []

    def plan(requests: RunningRequests) -> StepPlan:
        told.extend(requests.num_behind)
        may_draft = len(told) in (4, 5, 6, 10)
        return StepPlan(0, requests.slots, model=True) if may_draft else PLAIN_PLAN

    method.schedule.plan = plan  # type: ignore[method-assign]
    method.schedule.observe = lambda result: caught_up.append(result.work.caught_up)  # type: ignore[method-assign]
    engine.add(Request("r", [1, 2, 3, 4, 5, 6, 1], 40))
    for _ in range(10):
        engine.step()
    # A prompt of 7 tokens emits one; each plain step leaves one more unread.
    assert told[:4] == [6, 7, 8, 9]
    assert told[4:7] == [0, 0, 0], "the model has read"
    last = told[7]
    assert last in (1, 2, 3), "what the step emitted whose tree was the last one"
    assert told[7:] == [last, last + 1, last + 2]
    assert caught_up[4:7] == [9, 0, 0]
    assert model.num_read[0] == 11, "the token before the root, and the root besides"
