"""What a measured schedule learned of accepted tokens: of trees, and of requests."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from vllm_treespec.schedule.base import StepOutcome
from vllm_treespec.schedule.batch_sizes import nearest_size
from vllm_treespec.schedule.learned import FadingMean, RequestHistory, Spread
from vllm_treespec.schedule.options import Option

# Trees that a guess of what is accepted counts for, and accepted tokens that a guess
# about the text counts for.
GUESSED_TREES = 4.0
GUESSED_TEXT = 3.0
# Trees that a guess counts for of what a model adds in a step in which it is asked.
GUESSED_ADDED = 4.0
# Stands for any batch size: of trees that are the same in all of them, and of what an
# earlier start knew.
ANY_SIZE = 0
# Standard errors by which more may be accepted than was.
HOPED_ERRORS = 0.5


class Accepted(NamedTuple):
    """Accepted tokens, or how much more are accepted of a request's trees."""

    # as far as is known
    expected: float
    # for all we know
    hopeful: float


class Acceptance:
    """Means of accepted tokens, greedy and sampled requests apart.

    A mean for each tree. Trees whose drafts are weighed are smaller in larger batches,
    so they have a mean for each batch size. Each request has a factor of its own: how
    much more is accepted of its trees than of others'.

    Of a tree that an index and a model draft together the index's tokens are learned
    as those of the index alone, and the model's mean is of what it adds.
    """

    def __init__(
        self, options: Sequence[Option], free: Option | None, steps_at: Counter[int]
    ) -> None:
        """Begin with nothing measured.

        Args:
            options: of which trees are drawn.
            free: the index alone, if there is one.
            steps_at: steps so far, by batch size; those of ``ANY_SIZE`` are all. The
                schedule counts them. A mean does not fade while its batch size rests.

        """
        self.steps_at = steps_at
        self.free = free
        kinds = (False, True)
        # option's index, sampled -> batch size -> accepted tokens of a tree
        self.trees: dict[tuple[int | None, bool], dict[int, FadingMean]] = {
            (option.index, sampled): {} for option in options for sampled in kinds
        }
        # whether an index drafts alone, sampled -> accepted tokens over those that were
        # guessed
        self.text = {
            (is_free, sampled): FadingMean() for is_free in kinds for sampled in kinds
        }
        # by slot, of trees that an index drafts alone or not
        self.requests: dict[tuple[int, bool], RequestHistory] = {}
        # sampled -> tokens that a model added in steps in which it was asked beside an
        # index
        self.added = {sampled: FadingMean() for sampled in kinds}
        # how much requests differ, by whether an index drafts alone
        self.spreads = {is_free: Spread() for is_free in kinds}

    def observe(
        self,
        batch_size: int,
        option: Option,
        sampled_slots: Mapping[int, bool],
        outcome: StepOutcome,
    ) -> None:
        """Learn what was accepted of the trees of a step.

        Args:
            batch_size: of the step that brought the outcome.
            option: what it drew.
            sampled_slots: whether requests are sampled, by slot. Others tell nothing.
            outcome: what it brought.

        """
        parts, by_part = self.parts(option), [outcome.num_accepted]
        if len(parts) > 1:
            both = zip(outcome.num_accepted, outcome.num_found, strict=True)
            added = [accepted - found for accepted, found in both]
            by_part = [outcome.num_found, added]
            if outcome.num_levels:
                self._observe_added(sampled_slots, outcome.slots, added)
        for part, num_accepted in zip(parts, by_part, strict=True):
            self._observe(batch_size, part, sampled_slots, outcome, num_accepted)

    def _observe(
        self,
        batch_size: int,
        option: Option,
        sampled_slots: Mapping[int, bool],
        outcome: StepOutcome,
        num_accepted: Sequence[int],
    ) -> None:
        """Learn what was accepted of one part of the trees."""
        for sampled in (False, True):
            expected = self._mean_and_trees(batch_size, option, sampled)[0]
            num_trees = total = 0
            for slot, accepted, limit in zip(
                outcome.slots, num_accepted, outcome.limits, strict=True
            ):
                if sampled_slots.get(slot) is sampled:
                    key = slot, option.is_free
                    history = self.requests.setdefault(key, RequestHistory())
                    history.add(self.steps_at[ANY_SIZE], expected, accepted)
                    if limit >= option.num_drafts:
                        num_trees, total = num_trees + 1, total + accepted
            if num_trees:
                self._add(batch_size, option, sampled, num_trees, total)

    def _observe_added(
        self,
        sampled_slots: Mapping[int, bool],
        slots: Sequence[int],
        num_added: Sequence[int],
    ) -> None:
        """Learn what a model added in a step in which it was asked."""
        for slot, tokens in zip(slots, num_added, strict=True):
            if slot in sampled_slots:
                mean = self.added[sampled_slots[slot]]
                mean.add(self.steps_at[ANY_SIZE], 1.0, tokens)

    def first_level(self, slot: int, option: Option, sampled: bool) -> float:
        """Tokens that a model's first level adds where the index finds nothing.

        The number of tokens that all levels add is taken as geometric.
        """
        step = self.steps_at[ANY_SIZE]
        usual = self.added[sampled].mean(step, option.guess, GUESSED_ADDED)
        tokens = usual * self.factor(slot, option).expected
        return tokens / (1 + tokens)

    def _add(
        self,
        batch_size: int,
        option: Option,
        sampled: bool,
        num_trees: int,
        total: int,
    ) -> None:
        """Add whole trees, and what was accepted of them."""
        size = batch_size if option.weighs_drafts else ANY_SIZE
        by_size = self.trees[option.index, sampled]
        means = by_size.setdefault(size, FadingMean())
        means.add(self.steps_at[size], num_trees, total)
        text = self.text[option.is_free, sampled]
        text.add(self.steps_at[ANY_SIZE], num_trees * option.guess, total)

    def parts(self, option: Option) -> list[Option]:
        """The index alone and the option that adds to it; else the option itself."""
        if self.free is None or option is self.free:
            return [option]
        return [self.free, option]

    def of_text(self, batch_size: int, option: Option, sampled: bool) -> Accepted:
        """Tokens that will be accepted of a part, for a request like most.

        It may be half a standard error more. Their number is taken as geometric.
        """
        mean, num_trees = self._mean_and_trees(batch_size, option, sampled)
        error = math.sqrt(mean * (1 + mean) / num_trees)
        return Accepted(mean, mean + HOPED_ERRORS * error)

    def factor(self, slot: int, option: Option) -> Accepted:
        """How much more is accepted of a part of a request's trees than of others'."""
        history = self.requests.get((slot, option.is_free)) or RequestHistory()
        step = self.steps_at[ANY_SIZE]
        spread = self.spreads[option.is_free].value(step)
        return Accepted(history.expected(step, spread), history.hopeful(step, spread))

    def forget(self, slots: Sequence[int]) -> None:
        """Forget requests that ended; their slots will be other requests'."""
        for slot in slots:
            for is_free, spread in self.spreads.items():
                history = self.requests.pop((slot, is_free), None)
                if history is not None:
                    spread.add(self.steps_at[ANY_SIZE], history)

    def _mean_and_trees(
        self, batch_size: int, option: Option, sampled: bool
    ) -> tuple[float, float]:
        """The mean of a tree, and how many it is of, guessed ones included.

        The guess at a batch size is the mean at the nearest one.
        """
        text = self.text[option.is_free, sampled]
        mean = option.guess * text.mean(self.steps_at[ANY_SIZE], 1.0, GUESSED_TEXT)
        by_size = self.trees[option.index, sampled]
        places = [ANY_SIZE]
        if option.weighs_drafts:
            others = by_size.keys() - {batch_size, ANY_SIZE}
            nearest = nearest_size(others, batch_size)
            places += [batch_size] if nearest is None else [nearest, batch_size]
        num_trees = 0.0
        for size in places:
            means = by_size.get(size, FadingMean())
            mean = means.mean(self.steps_at[size], mean, GUESSED_TREES)
            num_trees = means.weight
        return mean, num_trees + GUESSED_TREES

    def together(self, option: Option, sampled: bool) -> FadingMean:
        """Accepted tokens of a tree at all batch sizes."""
        together = FadingMean()
        for means in self.trees[option.index, sampled].values():
            together.add(0, means.weight, means.total)
        return together

    def recall(
        self, option: Option, sampled: bool, mean: float, trees: float, text: float
    ) -> None:
        """Begin with what an earlier start knew of a tree.

        Args:
            option: the tree.
            sampled: whether its requests were.
            mean: accepted tokens.
            trees: that they count for.
            text: accepted tokens, of those that were guessed of all trees, that they
                count for.

        """
        by_size = self.trees[option.index, sampled]
        by_size.setdefault(ANY_SIZE, FadingMean()).add(0, trees, trees * mean)
        self.text[option.is_free, sampled].add(0, text, text * mean / option.guess)
