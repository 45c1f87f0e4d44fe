"""Trees that the host sees a step after they were scored."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch.nn.functional import pad

from tests.fast.no_waiting import NoWaiting
from tests.fast.test_masks import two_trees
from tests.fast.test_step_parts import CPU, STEP, TREES, after_step, scheduled
from vllm_treespec.batch.matching import PlacedTrees, Proposal
from vllm_treespec.batch.stats import StepStats
from vllm_treespec.batch.unseen import StepTrees, UnseenTrees, place_unseen
from vllm_treespec.schedule.clock import StepClock
from vllm_treespec.schedule.listed import ListedSchedule
from vllm_treespec.schedule.plan import (
    PLAIN_PLAN,
    RunningRequests,
    StepPlan,
    StepResult,
)
from vllm_treespec.testing.fake_views import ints
from vllm_treespec.trees.draft import Draft
from vllm_treespec.trees.source import Source

SLOTS = [4, 0, 2]
# rows for three drafts each
FULL = [[-1] * 3] * 3


def unseen() -> UnseenTrees:
    """Trees of three requests, one of which has no drafts."""
    return UnseenTrees.from_draft(Draft(TREES), 1, STEP - 1, ints(SLOTS), True)


def placed(order: list[int]) -> PlacedTrees:
    """The same in a step whose requests come in this order."""
    batch = scheduled([SLOTS[place] for place in order], FULL)
    trees = place_unseen(unseen(), batch, STEP, CPU)
    assert trees is not None
    return trees


def test_trees_find_their_requests() -> None:
    """Red when a tree that the host has not seen goes to another request."""
    trees = placed([2, 0, 1])
    assert trees.proposal_rows.tolist() == [2, 0, 1]
    assert torch.equal(trees.tree.token_ids, TREES.token_ids[[2, 0, 1]])
    assert trees.root_rows.tolist() == trees.query_starts.tolist() == [0, 4, 8]
    gone = unseen().without(ints([0, 2]))
    left = place_unseen(gone, scheduled([4, 0], FULL[:2]), STEP, CPU)
    assert left is not None
    assert left.slots.tolist() == [4]
    late = place_unseen(unseen(), scheduled([4, 0], FULL[:2]), STEP + 1, CPU)
    assert late is None, "trees of an earlier step"


def test_requests_without_rows_have_no_tree() -> None:
    """Red when a node of a tree takes a row that its request does not have."""
    trees = place_unseen(unseen(), scheduled([4, 0], [[-1] * 3, [-1] * 2]), STEP, CPU)
    assert trees is not None
    assert trees.host_reqs.tolist() == [0]


def test_the_host_sees_the_same() -> None:
    """Red when what is told of a step later is not what was scored."""
    batch = scheduled([0, 4, 2], FULL)
    order = [1, 0, 2]
    after = after_step([20, 31, 9], [4, 4, 4], [2, 3, 1])
    step = StepTrees(batch, placed(order), unseen()).seen(after)
    assert step.trees is not None
    assert step.proposal is not None
    late = Proposal.from_draft(Draft(TREES), 1, STEP - 1, ints(SLOTS), ints(range(3)))
    assert step.proposal.drafts() == late.drafts()
    assert step.trees.num_nodes.tolist() == [3, 4, 1]
    assert step.trees.drafts(0) == ([8, 8], [0, 1])
    assert step.trees.root_positions.tolist() == after.num_computed.tolist()
    assert step.accepted(after).tolist() == [1, 2, 0]
    stats = StepStats()
    stats.count_scored(after, step.trees, step.proposal, Source.MODEL)
    # a root alone is no tree
    assert stats.as_dict()["node_counts"] == {3: 1, 4: 1}


def test_nodes_are_placed_without_the_host() -> None:
    """Red when masks or positions of nodes depend on what the host has seen."""
    layout, trees, inputs = two_trees(CPU)
    layout.prepare_inputs(trees, inputs)
    masks, positions = layout.masks.node_masks.clone(), inputs.positions[0].clone()
    # four rows for either tree
    layout, trees, inputs = two_trees(CPU)
    wider = tuple(pad(axis, (0, 4)) for axis in inputs.positions)
    inputs, known = replace(inputs, positions=wider), vars(trees)
    names = PlacedTrees.__dataclass_fields__
    with NoWaiting():
        layout.prepare_inputs(PlacedTrees(**{n: known[n] for n in names}), inputs)
    assert torch.equal(layout.masks.node_masks[:11], masks[:11])
    assert torch.equal(inputs.positions[0][:11], positions[:11])
    assert not layout.masks.node_masks[11:].any(), "rows without a node are causal"


class Told(ListedSchedule):
    """Gives prepared plans, and keeps what it is told."""

    def __init__(self, plans: list[StepPlan]) -> None:
        super().__init__([])
        self.plans = plans
        self.results: list[StepResult] = []

    def plan(self, requests: RunningRequests) -> StepPlan:
        """The next of the plans."""
        return self.plans.pop(0)

    def observe(self, result: StepResult) -> None:
        """Keep it."""
        self.results.append(result)


def test_steps_are_told_with_their_own_plans() -> None:
    """Red when a step that is observed late is told as the one planned after it."""
    unusual = replace(PLAIN_PLAN, is_usual=False, lookup=True)
    schedule, now = Told([PLAIN_PLAN, unusual, PLAIN_PLAN]), [0.0]
    clock = StepClock(schedule, StepStats(), lambda: now[0])
    batch, after = scheduled([4], [[]]), after_step([9], [1], [1])
    after = replace(after, slots=ints([4]))
    requests = RunningRequests(1, [4], [False], [8], [0])

    def plan(time: float) -> None:
        now[0] = time
        clock.plan(requests, ints([4]), only_decoded=True)

    def observe(time: float) -> None:
        now[0] = time
        clock.observe(batch, after, None, ints([-1]), np.zeros((1, 2), dtype=np.int64))

    observe(0.0)
    plan(1.0)
    plan(2.0)
    observe(4.0)
    plan(4.5)
    observe(7.0)
    told = schedule.results[1:]
    assert [result.seconds for result in told] == [3.0, 3.0]
    assert [result.is_usual for result in told] == [True, False]
    assert [result.work.lookup for result in told] == [0.0, 1.0]
