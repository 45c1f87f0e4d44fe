"""What trees of each option bring: by kind, request and part."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from tests.fast.scheduled_trees import HEAD, HYBRID, INDEX, Tree
from vllm_treespec.schedule.plan import StepResult, Work
from vllm_treespec.schedule.values import OptionValues, TreeOption
from vllm_treespec.trees.source import Source

GREEDY, SAMPLED = False, True


class Measured:
    """Values of some trees, and steps that teach them."""

    def __init__(self, *trees: Tree) -> None:
        """Begin with nothing measured."""
        self.options = [
            TreeOption.of_tree(index, tree) for index, tree in enumerate(trees)
        ]
        self.values = OptionValues(self.options)

    def step(
        self,
        index: int,
        accepted: Sequence[int],
        *,
        sampled: bool = GREEDY,
        found: Sequence[int] = (),
        limit: int = 63,
        work: Work | None = None,
        first_slot: int = 0,
    ) -> None:
        """Observe trees of an option; ``found``: accepted tokens of the index."""
        slots = range(first_slot, first_slot + len(accepted))
        self.values.step += 1
        self.values.observe(
            self.options[index],
            dict.fromkeys(slots, sampled),
            StepResult(
                index,
                work or Work(4),
                slots=slots,
                num_drafts=[6] * len(slots),
                num_accepted=accepted,
                limits=[limit] * len(slots),
                accepted={Source.INDEX: found or [0] * len(slots)},
            ),
        )

    def mean(self, index: int, slot: int = 99, sampled: bool = GREEDY) -> float:
        """Accepted tokens of a request's next tree."""
        return self.values.tokens(self.options[index], slot, sampled).mean


def test_greedy_and_sampled_requests_are_learned_apart() -> None:
    """Red when what greedy requests accept is expected of sampled ones."""
    measured = Measured(HEAD[0])
    for _ in range(100):
        measured.step(0, [3, 3])
        measured.step(0, [0, 0], sampled=SAMPLED, first_slot=10)
    assert measured.mean(0) == pytest.approx(3.0, rel=0.1)
    assert measured.mean(0, sampled=SAMPLED) < 0.1


def test_each_request_has_a_factor_of_its_own() -> None:
    """Red when one request of bad drafts hides that another's are good."""
    measured = Measured(HEAD[0])
    for _ in range(60):
        measured.step(0, [3, 0])
    good, bad, other = (measured.mean(0, slot) for slot in (0, 1, 99))
    assert good == pytest.approx(3.0, rel=0.15)
    assert bad < 0.25
    assert other == pytest.approx(1.5, rel=0.1)
    measured.values.forget([0, 7])
    assert measured.mean(0, 0) == other


def test_one_tree_tells_of_others_of_its_source() -> None:
    """Red when each tree of a head must be drawn to learn what its text accepts."""
    measured = Measured(*HEAD)
    before = [measured.mean(index) for index in range(3)]
    for _ in range(60):
        measured.step(1, [0, 0])
    assert measured.mean(1) < 0.1 * before[1]
    assert measured.mean(0) < 0.2 * before[0]


def test_trees_that_requests_made_smaller_hide_nothing() -> None:
    """Red when requests that limit their trees change what whole trees bring."""
    measured = Measured(HEAD[0])
    for _ in range(60):
        measured.step(0, [3, 3])
        measured.step(0, [1], limit=1, first_slot=10)
    assert measured.mean(0) == pytest.approx(3.0, rel=0.1)
    whole = measured.values.work(measured.options[0], 4, 2.0, GREEDY)
    assert whole.rows == 2 * 16


def test_what_a_model_adds_is_learned_apart_from_the_index() -> None:
    """Red when what an index finds gives hope for the model beside it."""
    measured = Measured(HYBRID, INDEX)
    for _ in range(60):
        measured.step(0, [5], found=[3])
        measured.step(1, [3], found=[3])
    assert measured.mean(1) == pytest.approx(3.0, rel=0.1)
    assert measured.mean(0) == pytest.approx(5.0, rel=0.1)
    for _ in range(600):
        measured.step(0, [2], found=[0])
    assert measured.mean(0) == pytest.approx(2.0, rel=0.15)
    assert measured.mean(1) < 0.3


def test_the_model_has_value_where_the_index_finds_nothing() -> None:
    """Red when an index that finds nothing tells something of the model."""
    measured = Measured(HYBRID, INDEX)
    prior = measured.mean(0) - measured.mean(1)
    for _ in range(100):
        measured.step(1, [0], found=[0])
    assert measured.mean(1) < 0.1
    assert measured.mean(0) == pytest.approx(prior, abs=0.1)


def test_work_of_pruned_trees_is_what_they_were() -> None:
    """Red when a pruned tree is thought to have all its rows and levels."""
    measured = Measured(replace(HYBRID, draft_depth=6), INDEX)
    done = Work(4, rows=24, drafted=1.0, branches=0.0, levels=2)
    for _ in range(100):
        measured.step(0, [1] * 4, work=done)
    work = measured.values.work(measured.options[0], 4, 4.0, GREEDY)
    assert work.rows == pytest.approx(24, rel=0.1)
    assert work.levels == pytest.approx(2.0, rel=0.1)
    assert work.branches < 0.1
    assert work.lookup == 1.0
    fixed = Measured(HEAD[0])
    option = fixed.options[0]
    whole = Work(4, rows=48, drafted=1.0, branches=1.0, levels=option.levels)
    assert fixed.values.work(option, 4, 3.0, GREEDY) == whole
