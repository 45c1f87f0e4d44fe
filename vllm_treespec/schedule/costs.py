"""What steps cost a measured schedule: times by batch size and tree."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import median
from typing import NamedTuple

from vllm_treespec.schedule.batch_sizes import nearest_size
from vllm_treespec.schedule.forward_times import ForwardTimes
from vllm_treespec.schedule.learned import FEW_TIMES, FadingMean, StepTimes
from vllm_treespec.schedule.options import Option
from vllm_treespec.schedule.prices import DraftCosts, DraftParts, Prices

# What a step with trees takes longer than a plain one is hopefully less by this factor,
# where it was not measured.
HOPE = 0.5
# Rounds without any measured time, lately, after which an option is left out.
FRUITLESS_ROUNDS = 2.5
# Times of an earlier start are another machine's where new ones differ by more.
SAME_MACHINE = 1.5
# Steps that take so much longer, or less, show that the machine's speed has changed.
# Then an option that is not the best is timed again, if its times are so many steps
# old, and so many for each step that this loses: a two-hundredth of the time at most.
ANOTHER_SPEED = 1.2
LEAST_AGE = 16
STEPS_FOR_A_LOST_ONE = 200


class PlainSeconds(NamedTuple):
    """Time of a plain step."""

    seconds: float
    # what it may be by now for all we know, less the older the measured times are
    hopeful: float


class StepCosts:
    """Times of one kind of steps: of each option, at each batch size.

    Times count less and less, and are forgotten after about a thousand steps of their
    batch size.
    """

    def __init__(self, options: Sequence[Option]) -> None:
        """Begin with nothing measured; one of the options is plain."""
        # steps of this kind so far, by batch size; the schedule counts them
        self.steps_at: Counter[int] = Counter()
        self.by_index = {option.index: option for option in options}
        # batch size -> option's index -> times
        self.times: dict[int, dict[int | None, StepTimes]] = {}
        # of trees whose proposers weigh drafts
        self.drafts = DraftCosts()
        # batch size, option's index -> seconds of an earlier start, not yet checked
        self.recalled: dict[tuple[int, int | None], float] = {}
        self.is_other_machine = False
        # batch size, index of the best option and of another one -> step in which the
        # other one was timed last, and seconds of the best one's steps at that time
        self.seen_together: dict[
            tuple[int, int | None, int | None], tuple[int, float]
        ] = {}
        # batch size, option's index -> rounds in which no step could be timed
        self.fruitless: dict[tuple[int, int | None], FadingMean] = {}

    def begin_with(self, forwards: ForwardTimes) -> None:
        """Begin with forwards that the start has timed."""
        self.drafts.forwards = forwards

    def end_round(self, batch_size: int, option: Option, was_timed: bool) -> None:
        """Note whether a round of an option could be timed."""
        key = batch_size, option.index
        if was_timed:
            self.fruitless.pop(key, None)
        else:
            rounds = self.fruitless.setdefault(key, FadingMean())
            rounds.add(self.steps_at[batch_size], 1.0, 0.0)

    def add(
        self,
        batch_size: int,
        index: int | None,
        share: float,
        seconds: float,
        num_steps: int = 1,
    ) -> None:
        """Add a timed step.

        More trees take longer: of a step with fewer ones than requests, what it took
        longer than a plain step grows with them, and no time is less than the step's.

        Args:
            batch_size: of the step.
            index: of its option.
            share: of the requests that had a whole tree. More than 0, or plain.
            seconds: what it took.
            num_steps: that took so long each.

        """
        known = self.times.setdefault(batch_size, {})
        if index is not None and share < 1:
            if None not in known:
                return
            extra = max(seconds - known[None].seconds, 0.0)
            seconds += extra * (math.sqrt(1 / share) - 1)
        times = known.setdefault(index, StepTimes())
        times.add(self.steps_at[batch_size], seconds, num_steps)
        self._check_recalled(batch_size, index)

    def add_drafts(
        self,
        batch_size: int,
        counts: DraftParts,
        seconds: float,
        models: float = 0.0,
    ) -> None:
        """Add what a step took whose drafts were weighed; a plain one without any.

        Args:
            batch_size: of the step.
            counts: how often each part came.
            seconds: what it took.
            models: of these seconds those in which models drafted; 0: not known.

        """
        if not any(counts):
            self.add(batch_size, None, 0.0, seconds)
            return
        plain = self.times.get(batch_size, {}).get(None)
        if plain is not None:
            step = self.steps_at[batch_size]
            self.drafts.add(step, batch_size, counts, seconds, plain.seconds, models)

    def borrow(self, batch_size: int, other: StepCosts) -> None:
        """Begin with what drafts cost in the other kind of steps.

        It needs plain steps of both kinds at this batch size. Where other steps of this
        kind were timed, nothing is borrowed.
        """
        known, there = self._known(batch_size), other._known(batch_size)
        if list(known) != [None] or None not in there:
            return
        plain, step = known[None].seconds, self.steps_at[batch_size]
        for index, times in there.items():
            if index is not None:
                extra = max(times.seconds - there[None].seconds, 0.0)
                borrowed = self.times[batch_size].setdefault(index, StepTimes())
                borrowed.add(step, plain + extra)
        fitted = other.drafts.times.get(batch_size)
        if fitted is not None and batch_size not in self.drafts.times:
            parts = fitted.fit(other.steps_at[batch_size])
            self.drafts.recall(batch_size, plain, parts)

    def prices(self, batch_size: int, plain: float) -> Prices:
        """What drafts must promise, the same for all; ``plain`` seconds a step."""
        return self.drafts.prices(self.steps_at[batch_size], batch_size, plain, ())

    def without_catching_up(
        self, batch_size: int, num_tokens: float, seconds: float
    ) -> float:
        """What a step would have taken whose draft models were not behind."""
        plain = self.times.get(batch_size, {}).get(None)
        if plain is None or not num_tokens:
            return seconds
        each = self.caught_up_seconds(batch_size, plain.seconds)
        return max(seconds - num_tokens * each, min(plain.seconds, seconds))

    def _check_recalled(self, batch_size: int, index: int | None) -> None:
        """Forget all recalled times once new ones are far from one of them."""
        recalled = self.recalled.get((batch_size, index))
        times = self.times[batch_size][index]
        if recalled is None or len(times.latest) <= FEW_TIMES:
            return
        ratio = median(list(times.latest)[1:]) / recalled
        if 1 / SAME_MACHINE < ratio < SAME_MACHINE:
            del self.recalled[batch_size, index]
            return
        self.is_other_machine = True
        for size, option in self.recalled:
            del self.times[size][option]
        self.recalled = {}
        self.drafts = DraftCosts()

    def caught_up_seconds(self, batch_size: int, plain: float) -> float:
        """What a token takes that draft models are behind; ``plain`` seconds a step."""
        step = self.steps_at[batch_size]
        return self.drafts.caught_up_seconds(step, batch_size, plain)

    def plain(self, batch_size: int) -> PlainSeconds | None:
        """Time of plain steps, of another batch size where none can be timed here."""
        size = batch_size
        if None not in self._known(batch_size):
            nearest = self._nearest(None, batch_size)
            if nearest is None or not self.is_fruitless(batch_size, None):
                return None
            size = nearest
        times = self.times[size][None]
        return PlainSeconds(times.seconds, times.hopeful(self.steps_at[size]))

    def extra_seconds(self, batch_size: int, index: int | None, plain: float) -> float:
        """How much longer than a plain step one with trees takes, hopefully."""
        known = self._known(batch_size)
        if index in known:
            return known[index].hopeful(self.steps_at[batch_size]) - plain
        return max(
            self._hoped_extra(batch_size, known, index, plain),
            self._forwards_extra(batch_size, self.by_index[index]),
        )

    def _forwards_extra(self, batch_size: int, option: Option) -> float:
        """What the forwards of whole trees take, if they were timed at the start."""
        if option.weighs_drafts:
            return 0.0
        num_drafts, num_levels = option.num_drafts, option.num_levels
        return self.drafts.forwards.tree(batch_size, num_drafts, num_levels)

    def _hoped_extra(
        self,
        batch_size: int,
        known: Mapping[int | None, StepTimes],
        index: int | None,
        plain: float,
    ) -> float:
        """By another batch size, or by other trees, of which some were timed."""
        nearest = self._nearest(index, batch_size)
        if nearest is not None:
            there = self.times[nearest]
            extra = there[index].seconds - there[None].seconds
            ratio = batch_size / nearest
            return HOPE * max(extra, 0.0) * min(ratio, math.sqrt(math.sqrt(ratio)))
        a_draft = min(
            (
                (times.seconds - plain) / self.by_index[other].num_drafts
                for other, times in known.items()
                if other is not None
            ),
            default=0.0,
        )
        return HOPE * max(a_draft, 0.0) * self.by_index[index].num_drafts

    def is_new(self, index: int | None) -> bool:
        """Whether an option was not timed at any batch size."""
        return not any(index in known for known in self.times.values())

    def is_timed(self, batch_size: int, index: int | None) -> bool:
        """Whether an option was timed at a batch size, not too long ago."""
        return index in self._known(batch_size)

    def is_due(
        self, batch_size: int, best: int | None, rival: int | None, lost: float
    ) -> bool:
        """Whether an option that is not the best should be timed again.

        So it is where the best one's steps take another time than when the rival was
        timed last: then the machine's speed has changed.

        Args:
            batch_size: of the steps.
            best: index of the best option.
            rival: index of the other one.
            lost: of a round's time, in steps, what the rival loses if the ratio of both
                has not changed.

        """
        known = self._known(batch_size)
        if best not in known or rival not in known:
            return False
        times, seconds = known[rival], known[best].seconds
        key = batch_size, best, rival
        seen_at, before = self.seen_together.get(key, (-1, 0.0))
        if seen_at != times.timed_at:
            self.seen_together[key] = times.timed_at, seconds
            return False
        age = self.steps_at[batch_size] - times.timed_at
        if age < max(LEAST_AGE, STEPS_FOR_A_LOST_ONE * lost):
            return False
        return not 1 / ANOTHER_SPEED < seconds / before < ANOTHER_SPEED

    def is_fruitless(self, batch_size: int, index: int | None) -> bool:
        """Whether an option is not known, and could not be timed in several rounds."""
        return not self.is_timed(batch_size, index) and self._had_no_times(
            batch_size, index
        )

    def is_unchecked(self, batch_size: int) -> bool:
        """Whether the time of plain steps is an earlier start's, and can be checked."""
        if (batch_size, None) not in self.recalled:
            return False
        return not self._had_no_times(batch_size, None)

    def _known(self, batch_size: int) -> dict[int | None, StepTimes]:
        """Times at a batch size that are not too old."""
        return {
            index: times
            for index, times in self.times.get(batch_size, {}).items()
            if times.is_known(self.steps_at[batch_size])
        }

    def _nearest(self, index: int | None, batch_size: int) -> int | None:
        """The nearest batch size at which an option and plain steps were timed."""
        sizes = [
            size
            for size, known in self.times.items()
            if index in known and None in known
        ]
        return nearest_size(sizes, batch_size)

    def _had_no_times(self, batch_size: int, index: int | None) -> bool:
        """Whether an option could not be timed in several rounds lately."""
        rounds = self.fruitless.get((batch_size, index))
        if rounds is None:
            return False
        rounds.fade(self.steps_at[batch_size])
        return rounds.weight > FRUITLESS_ROUNDS
