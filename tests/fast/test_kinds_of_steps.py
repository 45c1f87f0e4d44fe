"""Greedy and sampled steps have times of their own."""

from __future__ import annotations

import pytest

from tests.fast.test_measured_schedule import Tree, outcome, running
from vllm_treespec.schedule.costs import StepCosts
from vllm_treespec.schedule.experience import Experience, experience_of, recall
from vllm_treespec.schedule.measured import MeasuredSchedule
from vllm_treespec.schedule.options import Option
from vllm_treespec.schedule.prices import DraftParts

TREE = Tree(4, 1, 4)
# A plain step in which requests are sampled, where a greedy one takes 1; what a tree
# takes besides, and the tokens that are accepted of each.
SAMPLED_PLAIN, EXTRA, ACCEPTED = 1.5, 0.35, 0.25


def serve(schedule: MeasuredSchedule, slot: int, sampled: bool, steps: int) -> float:
    """Let a request decode; returns the share of its steps with a tree."""
    with_tree = 0
    for step in range(steps):
        index, slots = schedule.choose(running([slot], sampled))
        plain = SAMPLED_PLAIN if sampled else 1.0
        accepted = [int(step % round(1 / ACCEPTED) == 0)] * len(slots)
        seconds = plain + EXTRA * (index is not None)
        schedule.observe(outcome(index, 1, slots, accepted, seconds))
        with_tree += index is not None
    schedule.forget([slot])
    return with_tree / steps


def test_a_sampled_step_is_no_measure_for_a_greedy_one() -> None:
    """Red when trees look cheap to greedy requests that came after sampled ones.

    A tree brings 1.25 tokens in 1.35 greedy steps, and in 1.23 sampled ones.
    """
    schedule = MeasuredSchedule([TREE], 64)
    shares = {False: 0.0, True: 0.0}
    for turn in range(60):
        sampled = turn % 2 == 0
        share = serve(schedule, turn, sampled, steps=40)
        if turn >= 30:
            shares[sampled] += share / 15
    assert shares[False] < 0.2
    for sampled, plain in ((False, 1.0), (True, SAMPLED_PLAIN)):
        times = schedule.times.costs_by_kind[sampled].times[1][None]
        assert times.seconds == pytest.approx(plain, rel=0.01)


def costs_of(*seconds: float) -> StepCosts:
    """Times of plain steps, and then of a tree's, at batch size 4."""
    options = [Option(None, 0, 0.0), Option(0, 4, 1.0)]
    costs = StepCosts(options)
    for option, time in zip(options, seconds, strict=False):
        costs.add(4, option.index, 1.0, time)
    return costs


def test_the_other_kind_tells_what_drafts_cost() -> None:
    """Red when each kind of steps must try again what the other has shown."""
    greedy, sampled = costs_of(1.0, 1.3), costs_of(1.5)
    for number in range(40):
        counts = DraftParts.of_step(1, number % 8, 0, False)
        greedy.add_drafts(4, counts, 1.2 + 0.05 * (number % 8))
    sampled.borrow(4, greedy)
    assert sampled.times[4][0].seconds == pytest.approx(1.8)
    mine, theirs = (c.prices(4, 1.5) for c in (sampled, greedy))
    assert mine.draft == pytest.approx(theirs.draft, rel=0.05)


def test_what_a_kind_knows_is_not_borrowed() -> None:
    """Red when measured times are replaced by another kind's."""
    own = costs_of(1.5, 1.6)
    own.borrow(4, costs_of(1.0, 2.0))
    assert own.times[4][0].seconds == 1.6
    nothing = costs_of(1.5)
    nothing.borrow(4, costs_of())
    assert list(nothing.times[4]) == [None]
    untimed = costs_of()
    untimed.borrow(4, costs_of(1.0, 2.0))
    assert not untimed.times


def test_both_kinds_are_kept_for_the_next_start() -> None:
    """Red when a start takes sampled steps' times for greedy ones'."""
    schedule = MeasuredSchedule([TREE], 64)
    for sampled, seconds in ((False, 1.0), (True, 1.5)):
        schedule.times.costs_by_kind[sampled].add(4, None, 0.0, seconds)
    kept = experience_of(schedule).model_dump_json()
    again = MeasuredSchedule([TREE], 64)
    recall(again, Experience.model_validate_json(kept))
    known = {kind: c.times[4][None] for kind, c in again.times.costs_by_kind.items()}
    assert {kind: times.seconds for kind, times in known.items()} == {
        False: 1.0,
        True: 1.5,
    }
