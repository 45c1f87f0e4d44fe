"""Which tree is drawn: by batch size, by what was accepted, and never by a draw."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from tests.fast.scheduled_trees import ALL, result_of, running
from vllm_treespec.config import parse_spec_config
from vllm_treespec.schedule.listed import MIN_TREES, PAUSE_STEPS, ListedSchedule
from vllm_treespec.schedule.plan import PLAIN_PLAN

SPEC = {"method": "rsd_s", "model": "draft", "beam_width": 3, "depth": 3}
LADDER = [
    {"batch_size": 2, "min_acceptance_length": 1.5},
    {"batch_size": 4, "beam_width": 2, "min_acceptance_length": 1.2},
    {"batch_size": 8, "beam_width": 1, "depth": 1},
]


class Listed(ListedSchedule):
    """A list of trees, asked by the number of requests."""

    def tree_of(self, num_reqs: int) -> int | None:
        """Index of the tree for so many requests."""
        plan = self.plan(running(range(num_reqs)))
        assert plan == PLAIN_PLAN or plan.slots == range(num_reqs)
        return plan.tree

    def accept(
        self, index: int, num_accepted: list[int], limit: int = ALL, drafts: int = 3
    ) -> None:
        """Observe scored trees of requests with a limit of their own."""
        count = len(num_accepted)
        requests = running(range(count), limits=[limit] * count)
        plan = self.whole_tree(index, requests.slots)
        self.observe(result_of(plan, requests, None, num_accepted, [drafts] * count))


def schedule(entries: Any = LADDER) -> Listed:
    config = parse_spec_config({**SPEC, "schedule": entries})
    return Listed(config.scheduled_trees())


def test_batch_size_chooses() -> None:
    """Red when a large batch keeps a tree that costs more than it brings."""
    chosen = [schedule().tree_of(n) for n in (1, 2, 3, 4, 5, 8, 9, 100)]
    assert chosen == [0, 0, 1, 1, 2, 2, None, None]
    names = [tree.name for tree in schedule().trees]
    assert names == ["rsd_s 3x3", "rsd_s 2x3", "rsd_s 1x1"]


def test_fixed_never_changes() -> None:
    """Red when "fixed" starts to depend on anything."""
    fixed = schedule("fixed")
    fixed.accept(0, [0] * 10 * MIN_TREES)
    assert [fixed.tree_of(n) for n in (1, 1000)] == [0, 0]


def test_measured_trees_have_no_limits() -> None:
    """Red when a tree of the default schedule is left out for what was not measured."""
    trees = parse_spec_config(SPEC).scheduled_trees()
    assert [tree.name for tree in trees] == [
        "rsd_s 3x3",
        "rsd_s 2x1",
        "rsd_s 1x1",
    ]
    assert all(tree.batch_size > 10**6 for tree in trees)


def test_trees_without_drafts_do_not_count() -> None:
    """Red when a suffix tree is given up because there was nothing to look up."""
    adaptive = schedule()
    adaptive.tree_of(1)
    adaptive.accept(0, [0] * 2 * MIN_TREES, drafts=0)
    assert adaptive.tree_of(1) == 0


def test_trees_that_requests_made_smaller_do_not_count() -> None:
    """Red when a tree is given up for what one draft of it brought."""
    adaptive = schedule()
    adaptive.tree_of(1)
    adaptive.accept(0, [0] * 2 * MIN_TREES, limit=1)
    assert adaptive.tree_of(1) == 0


def test_a_tree_not_worth_it_is_given_up_and_tried_again() -> None:
    """Red when a low acceptance length is put up with, or never looked at again."""
    adaptive = schedule()
    adaptive.tree_of(1)
    adaptive.accept(0, [0] * (MIN_TREES - 1))
    assert adaptive.tree_of(1) == 0
    adaptive.accept(0, [1])
    assert adaptive.tree_of(1) == 1
    adaptive.accept(1, [0] * MIN_TREES)
    assert adaptive.tree_of(1) == 2
    adaptive.accept(2, [0] * MIN_TREES)
    assert adaptive.tree_of(1) == 2, "an acceptance length of 1 was asked for"
    later = [adaptive.tree_of(1) for _ in range(PAUSE_STEPS)]
    assert set(later[:-9]) == {2}
    assert later[-1] == 0


def test_old_trees_are_forgotten() -> None:
    """Red when a good past hides for ever that drafts have become bad."""
    adaptive = schedule()
    adaptive.tree_of(1)
    adaptive.accept(0, [3] * 10 * MIN_TREES)
    for _ in range(1000):
        adaptive.accept(0, [0, 0])
    assert adaptive.tree_of(1) == 1


def test_use_always() -> None:
    """Red when a benchmark of one tree measures another."""
    adaptive = schedule()
    adaptive.force_tree({"beam_width": 2})
    assert [adaptive.tree_of(n) for n in (1, 1000)] == [1, 1]
    adaptive.force_tree(None)
    assert adaptive.tree_of(1) == 0
    with pytest.raises(ValueError, match="it has rsd_s 3x3, rsd_s 2x3, rsd_s 1x1"):
        adaptive.force_tree({"beam_width": 7})


def test_choosing_needs_no_spec_config() -> None:
    """Red when the core imports spec-configs, or pydantic, again."""
    code = (
        "import sys, vllm_treespec.schedule.scheduler, vllm_treespec.trees.sizes\n"
        "unwanted = {'pydantic', 'torch', 'vllm_treespec.config'}\n"
        "sys.exit(bool(unwanted & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
