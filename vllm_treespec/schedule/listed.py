"""A list of trees with limits: the first that fits is drawn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from vllm_treespec.schedule.base import Schedule, ScheduledTree
from vllm_treespec.schedule.plan import (
    PLAIN_PLAN,
    RunningRequests,
    StepPlan,
    StepResult,
)

# Scored trees that a measured acceptance length needs, and that its mean covers.
MIN_TREES = 64
WINDOW_TREES = 512
# Steps for which a tree that was given up is left out.
PAUSE_STEPS = 2048
# Plain steps that follow a planned one.
REST_STEPS = 3


@dataclass
class TreeMeasurement:
    """What was accepted of one tree of the schedule lately."""

    trees: float = 0.0
    emitted: float = 0.0
    paused_until: int = 0


class ListedSchedule(Schedule):
    """Chooses from a list of trees by their limits.

    The first tree whose batch size is large enough is drawn, unless it was given up:
    its mean acceptance length over the last trees fell below its
    ``min_acceptance_length``. Such a tree is tried again after a while.
    """

    def __init__(self, trees: Sequence[ScheduledTree]) -> None:
        """Take the schedule's trees in their order."""
        super().__init__(trees)
        self.measured = [TreeMeasurement() for _ in trees]
        self.step = 0
        self.is_plain = False

    def _rest_steps(self) -> int:
        """A few, after a plain step."""
        return REST_STEPS if self.is_plain else 0

    def _plan(self, requests: RunningRequests) -> StepPlan:
        """Take the first tree that fits and was not given up, for all requests."""
        self.step += 1
        for index, tree in enumerate(self.trees):
            if (
                requests.num_reqs <= tree.batch_size
                and self.step >= self.measured[index].paused_until
            ):
                self.is_plain = False
                return self.whole_tree(index, requests.slots)
        self.is_plain = True
        return PLAIN_PLAN

    def observe(self, result: StepResult) -> None:
        """Count scored trees; gives a tree up whose drafts are not worth it.

        Trees that requests made smaller do not count.
        """
        self.step += result.num_steps - 1
        if result.tree is None:
            return
        num_whole = self.trees[result.tree].sizes.max_nodes - 1
        scored = [
            accepted
            for drafts, accepted, limit in zip(
                result.num_drafts, result.num_accepted, result.limits, strict=True
            )
            if drafts and limit >= num_whole
        ]
        measured = self.measured[result.tree]
        measured.trees += len(scored)
        measured.emitted += len(scored) + sum(scored)
        if measured.trees < MIN_TREES:
            return
        acceptance_length = measured.emitted / measured.trees
        if acceptance_length < self.trees[result.tree].min_acceptance_length:
            self.measured[result.tree] = TreeMeasurement(
                paused_until=self.step + PAUSE_STEPS
            )
        elif measured.trees > WINDOW_TREES:
            measured.trees /= 2
            measured.emitted /= 2

    def forget(self, slots: Sequence[int]) -> None:
        """Do nothing: nothing is learned of single requests."""
