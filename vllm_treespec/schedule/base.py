"""Which tree a step draws: a list with limits, and what all schedules share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from vllm_treespec.aids import Aid
from vllm_treespec.schedule.prices import Prices
from vllm_treespec.trees.sizes import TreeSizes

# Scored trees that a measured acceptance length needs, and that its mean covers.
MIN_TREES = 64
WINDOW_TREES = 512
# Steps for which a tree that was given up is left out.
PAUSE_STEPS = 2048
# Plain steps that follow a chosen one.
REST_STEPS = 3


class ScheduledTree(Protocol):
    """One tree of a schedule, as much as choosing needs to know of it."""

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
    def weighs_drafts(self) -> bool:
        """Whether its proposer leaves out drafts that promise less than their price."""

    @property
    def is_free(self) -> bool:
        """Whether a step is nearly a plain one where all its drafts are left out."""

    def has_shape(self, shape: Mapping[str, object]) -> bool:
        """Whether it is the tree that these keys of a spec-config stand for."""


@dataclass(frozen=True)
class RunningRequests:
    """The requests for which a step chooses a tree."""

    # all that run, those that decode plainly included
    num_reqs: int
    # of the requests that may draft
    slots: Sequence[int]
    # whether these requests are sampled, that is not greedy
    sampled: Sequence[bool]
    # draft tokens that each of these requests lets its tree have
    limits: Sequence[int]
    # tokens of earlier steps that draft models would have to read for these requests
    num_behind: Sequence[int]


@dataclass(frozen=True)
class StepOutcome:
    """What a step brought whose tree was chosen at the end of the step before.

    The sequences have an entry for each request whose tree came back.
    """

    # of the tree in the schedule; None: plain
    index: int | None
    # requests that ran
    num_reqs: int
    slots: Sequence[int] = ()
    num_drafts: Sequence[int] = ()
    num_accepted: Sequence[int] = ()
    # draft tokens that the request let its tree have, whatever was drawn
    limits: Sequence[int] = ()
    # accepted tokens that their trees promised, of an index's part if a model drafts
    # beside one; 0: nothing was promised
    promised: Sequence[float] = ()
    # of a step, from the choice of this tree to the next choice; None where it did
    # other work, too, such as reading a prompt
    seconds: float | None = None
    # that draft models read for these trees
    num_levels: int = 0
    # what came true of ``promised``; left out: ``num_accepted``
    num_kept: Sequence[int] = ()
    # tokens of earlier steps that draft models read for these trees
    num_caught_up: int = 0
    # of the accepted tokens those that an index drafted, if a model drafts beside one
    num_found: Sequence[int] = ()
    # from the choice of this tree to its drafts, if any were looked for
    drafting_seconds: float = 0.0
    # accepted tokens that a model promised beside an index, and those of its drafts
    # that were accepted
    model_promised: Sequence[float] = ()
    model_kept: Sequence[int] = ()
    # steps that it was, all like this one: more than one where plain ones rested
    num_steps: int = 1
    # whether any of these trees is no chain
    has_branches: bool = False


class Schedule(ABC):
    """Chooses the tree of every step; ``None`` stands for plain decoding.

    The choice depends on past steps alone and is the same on every rank; it changes
    what drafting costs, never what is emitted. A decoder asks through ``aid``, so that
    steps are plain after an error.
    """

    def __init__(self, trees: Sequence[ScheduledTree]) -> None:
        """Take the schedule's trees in their order."""
        self.trees = trees
        self.forced_index: int | None = None
        self.aid = Aid("The schedule of draft trees", "every step is plain")

    @property
    def rest_steps(self) -> int:
        """Plain steps that follow the chosen one, if the same requests go on decoding.

        It is not asked about them. It is told of all of them at once, after the last.
        """
        return 0 if self.forced_index is not None else self._rest_steps()

    def _rest_steps(self) -> int:
        """The same where no tree is forced."""
        return 0

    def choose(self, requests: RunningRequests) -> tuple[int | None, Sequence[int]]:
        """Choose for a step of these requests.

        Returns:
            the index of the tree, None for a plain step; and the slots of the requests
            that it is drawn for.

        """
        index, slots = self._choose(requests)
        if self.forced_index is not None:
            return self.forced_index, requests.slots
        return index, slots

    @abstractmethod
    def _choose(self, requests: RunningRequests) -> tuple[int | None, Sequence[int]]:
        """Choose where no tree is forced."""

    def prices(self, slots: Sequence[int]) -> Prices | None:
        """What the drafts of the chosen tree must promise.

        Args:
            slots: of the requests that it is drawn for.

        Returns:
            the prices; None: the whole tree is drawn.

        """
        return None if self.forced_index is not None else self._prices(slots)

    def _prices(self, slots: Sequence[int]) -> Prices | None:
        """The same where no tree is forced."""
        return None

    @abstractmethod
    def observe(self, outcome: StepOutcome) -> None:
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

    def _choose(self, requests: RunningRequests) -> tuple[int | None, Sequence[int]]:
        """Take the first tree that fits and was not given up, for all requests."""
        self.step += 1
        for index, tree in enumerate(self.trees):
            if (
                requests.num_reqs <= tree.batch_size
                and self.step >= self.measured[index].paused_until
            ):
                self.is_plain = False
                return index, requests.slots
        self.is_plain = True
        return None, ()

    def observe(self, outcome: StepOutcome) -> None:
        """Count scored trees; gives a tree up whose drafts are not worth it.

        Trees that requests made smaller tell nothing of it.
        """
        self.step += outcome.num_steps - 1
        if outcome.index is None:
            return
        num_whole = self.trees[outcome.index].sizes.max_nodes - 1
        scored = [
            accepted
            for drafts, accepted, limit in zip(
                outcome.num_drafts, outcome.num_accepted, outcome.limits, strict=True
            )
            if drafts and limit >= num_whole
        ]
        measured = self.measured[outcome.index]
        measured.trees += len(scored)
        measured.emitted += len(scored) + sum(scored)
        if measured.trees < MIN_TREES:
            return
        acceptance_length = measured.emitted / measured.trees
        if acceptance_length < self.trees[outcome.index].min_acceptance_length:
            self.measured[outcome.index] = TreeMeasurement(
                paused_until=self.step + PAUSE_STEPS
            )
        elif measured.trees > WINDOW_TREES:
            measured.trees /= 2
            measured.emitted /= 2

    def forget(self, slots: Sequence[int]) -> None:
        """Do nothing: nothing is learned of single requests."""
