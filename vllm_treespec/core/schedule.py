"""Which tree a step draws: by batch size, and by what was accepted so far."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

# Scored trees that a measured acceptance length needs, and that its mean covers.
MIN_TREES = 64
WINDOW_TREES = 512
# Steps for which a tree that was given up is left out.
PAUSE_STEPS = 2048


class ScheduledTree(Protocol):
    """One tree of a schedule, as much as choosing needs to know of it."""

    @property
    def name(self) -> str:
        """Method and shape."""

    @property
    def batch_size(self) -> int:
        """Most running requests in a step that draws it."""

    @property
    def min_acceptance_length(self) -> float:
        """It is given up when less is measured."""

    def has_shape(self, shape: Mapping[str, object]) -> bool:
        """Whether it is the tree that these keys of a spec-config stand for."""


@dataclass
class TreeMeasurement:
    """What was accepted of one tree of the schedule lately."""

    trees: float = 0.0
    emitted: float = 0.0
    paused_until: int = 0


class AdaptiveSchedule:
    """Chooses the tree of every step; ``None`` stands for plain decoding.

    The first tree of the schedule whose batch size is large enough is drawn, unless
    it was given up: its mean acceptance length over the last trees fell below its
    ``min_acceptance_length``. Such a tree is tried again after a while. The choice
    depends on past steps alone and is the same on every rank; it changes what
    drafting costs, never what is emitted.
    """

    def __init__(self, trees: Sequence[ScheduledTree]) -> None:
        """Take the schedule's trees in their order."""
        self.trees = trees
        self.measured = [TreeMeasurement() for _ in trees]
        self.step = 0
        self.forced_index: int | None = None

    def choose(self, num_reqs: int) -> int | None:
        """Index of the tree for a step of ``num_reqs`` requests; None = plain."""
        self.step += 1
        if self.forced_index is not None:
            return self.forced_index
        for index, tree in enumerate(self.trees):
            if (
                num_reqs <= tree.batch_size
                and self.step >= self.measured[index].paused_until
            ):
                return index
        return None

    def observe(self, index: int, num_accepted: Sequence[int]) -> None:
        """Count scored trees; gives a tree up whose drafts are not worth it."""
        measured = self.measured[index]
        measured.trees += len(num_accepted)
        measured.emitted += len(num_accepted) + sum(num_accepted)
        if measured.trees < MIN_TREES:
            return
        acceptance_length = measured.emitted / measured.trees
        if acceptance_length < self.trees[index].min_acceptance_length:
            self.measured[index] = TreeMeasurement(paused_until=self.step + PAUSE_STEPS)
        elif measured.trees > WINDOW_TREES:
            measured.trees /= 2
            measured.emitted /= 2

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
