"""What every schedule is: it plans each step, and learns from its result."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Protocol

from vllm_treespec.aids import Aid
from vllm_treespec.schedule.plan import RunningRequests, StepPlan, StepResult
from vllm_treespec.trees.sizes import TreeSizes
from vllm_treespec.trees.source import Source


class ScheduledTree(Protocol):
    """One tree of a schedule, as far as planning reads it."""

    @property
    def name(self) -> str:
        """Method and shape."""

    @property
    def sizes(self) -> TreeSizes:
        """How large it becomes."""

    @property
    def batch_size(self) -> int:
        """Most running requests in a step that draws it."""

    @property
    def min_acceptance_length(self) -> float:
        """It is given up when less is measured."""

    @property
    def sources(self) -> Source:
        """What drafts it."""

    @property
    def prunes_by_cost(self) -> bool:
        """Whether its proposer leaves out drafts that are worth less than their row."""

    def has_shape(self, shape: Mapping[str, object]) -> bool:
        """Whether it is the tree that these keys of a spec-config stand for."""


class Schedule(ABC):
    """Plans what every step drafts.

    A plan follows from past steps alone and is the same on every rank; it changes what
    drafting costs, never what is emitted. A decoder plans through ``aid``, so that
    steps are plain after an error.
    """

    def __init__(self, trees: Sequence[ScheduledTree]) -> None:
        """Take the schedule's trees in their order."""
        self.trees = trees
        self.forced_index: int | None = None
        self.aid = Aid("The schedule of draft trees", "every step is plain")

    @property
    def cuts_levels(self) -> bool:
        """Whether plans may let draft models read fewer levels."""
        return False

    @property
    def rest_steps(self) -> int:
        """Plain steps that follow the planned one, if the same requests go on decoding.

        They are not planned. ``observe`` gets all of them at once, after the last.
        """
        return 0 if self.forced_index is not None else self._rest_steps()

    def _rest_steps(self) -> int:
        """The same where no tree is forced."""
        return 0

    def plan(self, requests: RunningRequests) -> StepPlan:
        """Plan a step of these requests."""
        plan = self._plan(requests)
        if self.forced_index is None:
            return plan
        return self.whole_tree(self.forced_index, requests.slots)

    @abstractmethod
    def _plan(self, requests: RunningRequests) -> StepPlan:
        """The same where no tree is forced."""

    def whole_tree(self, index: int, slots: Sequence[int]) -> StepPlan:
        """Plan a tree of which nothing is left out for its cost."""
        sources = self.trees[index].sources
        lookup, model = Source.INDEX in sources, Source.MODEL in sources
        return StepPlan(index, slots, lookup, model)

    @abstractmethod
    def observe(self, result: StepResult) -> None:
        """Learn from a step."""

    @abstractmethod
    def forget(self, slots: Sequence[int]) -> None:
        """Forget what was learned of requests that ended."""

    def force_tree(self, shape: Mapping[str, object] | None) -> None:
        """Draw the tree of this shape in every step; None: follow the schedule.

        Raises:
            ValueError: when the schedule has no such tree.

        """
        if shape is None:
            self.forced_index = None
            return
        for index, tree in enumerate(self.trees):
            if tree.has_shape(shape):
                self.forced_index = index
                return
        names = ", ".join(tree.name for tree in self.trees)
        raise ValueError(f"the schedule has no tree {shape}; it has {names}")
