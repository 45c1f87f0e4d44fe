"""A schedule that measures: each step draws what brings most tokens a second."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple

from vllm_treespec.core.learned import (
    FEW_TIMES,
    FadingMean,
    RequestHistory,
    StepTimes,
)
from vllm_treespec.core.options import Option, guessed_accepted, measured_together
from vllm_treespec.core.prices import DraftCosts, Prices, Promises
from vllm_treespec.core.schedule import (
    RunningRequests,
    Schedule,
    ScheduledTree,
    StepOutcome,
)

# Steps between two choices; the first one after a change is not timed.
ROUND_STEPS = 4
# Trees that a guess of what is accepted counts for, and accepted tokens that a guess
# about the text counts for.
GUESSED_TREES = 4.0
GUESSED_TEXT = 3.0
# Standard errors by which more may be accepted than was.
HOPED_ERRORS = 0.5
# What a step with trees takes longer than a plain one is hopefully less by this factor,
# where it was not measured.
HOPE = 0.5
# How much faster than plain decoding a tree must promise to be. Hopes come true in part
# only, so a tree that promises less costs time in looking at it.
WORTH_A_TREE = 1.04
# Rounds without any measured time, lately, after which an option is left out.
FRUITLESS_ROUNDS = 2.5
# Times of an earlier start are another machine's where new ones differ by more.
SAME_MACHINE = 1.5


@dataclass(frozen=True)
class TimedStep:
    """What a step did of which the time is known."""

    batch_size: int
    index: int | None
    num_reqs: int
    # of trees that requests made smaller the part that was left
    num_trees: float
    # of all trees
    num_drafts: int


class Gain(NamedTuple):
    """What a request's tree may bring."""

    # hoped-for accepted tokens
    tokens: float
    slot: int
    # of a whole tree
    share: float


class MeasuredSchedule(Schedule):
    """Chooses by measured times and acceptance (docs/adaptive.md).

    A choice holds for a *round* of a few steps. It is the option of the most tokens a
    second: expected tokens of a step over the step's time. What was measured long ago
    counts less, and the guess in its place is hopeful. So each option is tried again
    from time to time: soon where it is close to the best, late where it is not.

    Accepted tokens are learned for each tree, separately for greedy and for sampled
    requests. Each request has a factor of its own besides: how much more is accepted of
    its trees than of others'. Times are learned for each option and batch size.

    A request may limit its trees (docs/per-request.md). They count for the part that
    is left in costs, for that request in acceptance, and for no other one.
    """

    def __init__(
        self,
        trees: Sequence[ScheduledTree],
        max_trees: int,
        share: Callable[[list[float]], list[float]] = lambda seconds: seconds,
    ) -> None:
        """Begin with nothing measured.

        Args:
            trees: in any order.
            max_trees: requests that may carry a tree in one step.
            share: hands out rank 0's times, which all ranks choose by.

        """
        super().__init__(trees)
        self.max_trees = max_trees
        self.share = share
        drawn = [
            Option(index, tree.sizes.max_nodes - 1, guessed_accepted(tree))
            for index, tree in enumerate(trees)
        ]
        # of equal sizes, such as trees of surer drafts, later ones count as smaller
        drawn.reverse()
        drawn.sort(key=lambda option: (option.num_drafts, option.guess))
        self.plain = Option(None, 0, 0.0)
        # from the smallest to the largest
        self.options = [self.plain, *drawn]
        self.by_index = {option.index: option for option in self.options}
        self.step = 0
        # batch size -> option's index -> times
        self.times: dict[int, dict[int | None, StepTimes]] = {}
        # batch size, option's index -> seconds of an earlier start, not yet checked
        self.recalled: dict[tuple[int, int | None], float] = {}
        self.is_other_machine = False
        # batch size, option's index -> rounds in which no step could be timed
        self.fruitless: dict[tuple[int, int | None], FadingMean] = {}
        # option's index, sampled -> accepted tokens of a tree
        self.accepted = {
            (option.index, sampled): FadingMean()
            for option in self.options
            for sampled in (False, True)
        }
        # sampled -> accepted tokens over those that were guessed
        self.text = {False: FadingMean(), True: FadingMean()}
        # by slot
        self.requests: dict[int, RequestHistory] = {}
        # of trees whose proposers weigh drafts
        self.promises = Promises()
        self.draft_costs = DraftCosts()
        # of the requests of the last choice, by slot
        self.sampled: dict[int, bool] = {}
        # the running round
        self.batch_size = 0
        self.chosen = self.plain
        # of a plain step, when the round began
        self.plain_seconds = 0.0
        # slots of requests for which the chosen tree is not drawn
        self.left_out: frozenset[int] = frozenset()
        self.steps_left = 0
        self.is_timed = False
        # whether the step before was of the same option and batch size; only then a
        # step is timed
        self.settled = False
        self.new_steps: list[TimedStep] = []
        self.new_seconds: list[float] = []

    def _begin_round(
        self, batch_size: int, option: Option, left_out: frozenset[int]
    ) -> None:
        """Draw an option for some steps."""
        self.settled = (batch_size, option) == (self.batch_size, self.chosen)
        self.batch_size, self.chosen = batch_size, option
        self.left_out = left_out
        self.steps_left = ROUND_STEPS
        self.is_timed = False

    def _choose(self, requests: RunningRequests) -> tuple[int | None, Sequence[int]]:
        """Go on with the round, or begin one with the best option."""
        self.step += 1
        self.steps_left -= 1
        self.settled = True
        batch_size = measured_together(requests.num_reqs)
        if self.steps_left <= 0 or batch_size != self.batch_size:
            self._end_round()
            self._begin_round(batch_size, *self._best(batch_size, requests))
        self.sampled = dict(zip(requests.slots, requests.sampled, strict=True))
        slots = [slot for slot in requests.slots if slot not in self.left_out]
        if self.chosen is self.plain or not slots:
            return None, ()
        return self.chosen.index, slots

    def _prices(self, slots: Sequence[int]) -> Prices | None:
        """By measured times, if the chosen tree's proposer weighs its drafts."""
        if not self._weighs(self.chosen.index):
            return None
        kept = [
            self.promises.kept(self.step, slot, self.sampled[slot]) for slot in slots
        ]
        return self.draft_costs.prices(
            self.step, self.batch_size, self.plain_seconds, kept
        )

    def _weighs(self, index: int | None) -> bool:
        """Whether it is a tree whose proposer weighs its drafts."""
        return index is not None and self.trees[index].weighs_drafts

    def observe(self, outcome: StepOutcome) -> None:
        """Learn the time of a step, and what was accepted of its trees."""
        forced = self.forced_index is not None
        option = self.by_index[outcome.index]
        num_trees = 0.0
        if option is not self.plain:
            num_trees = sum(map(option.share, outcome.limits))
            self._observe_trees(option, outcome)
            self._observe_promises(outcome)
        of_option = option is self.plain or num_trees > 0
        if outcome.seconds is not None and self.settled and not forced and of_option:
            step = TimedStep(
                self.batch_size,
                outcome.index,
                outcome.num_reqs,
                num_trees,
                sum(outcome.num_drafts),
            )
            self.new_steps.append(step)
            self.new_seconds.append(outcome.seconds)
            self.is_timed = True

    def _observe_trees(self, option: Option, outcome: StepOutcome) -> None:
        """Learn what was accepted of the trees of a step."""
        for sampled in (False, True):
            expected = self.expected_accepted(option, sampled)
            num_trees = total = 0
            for slot, accepted, limit in zip(
                outcome.slots, outcome.num_accepted, outcome.limits, strict=True
            ):
                if self.sampled.get(slot) is sampled:
                    history = self.requests.setdefault(slot, RequestHistory())
                    history.add(self.step, expected, accepted)
                    if limit >= option.num_drafts:
                        num_trees, total = num_trees + 1, total + accepted
            if num_trees:
                self.accepted[option.index, sampled].add(self.step, num_trees, total)
                self.text[sampled].add(self.step, num_trees * option.guess, total)

    def _observe_promises(self, outcome: StepOutcome) -> None:
        """Learn what was accepted of the tokens that trees promised."""
        for slot, promised, accepted in zip(
            outcome.slots, outcome.promised, outcome.num_accepted, strict=True
        ):
            if promised and slot in self.sampled:
                self.promises.observe(
                    self.step, slot, self.sampled[slot], promised, accepted
                )

    def forget(self, slots: Sequence[int]) -> None:
        """Forget requests that ended; their slots will be other requests'."""
        self.promises.forget(slots)
        for slot in slots:
            self.requests.pop(slot, None)
        self.left_out -= set(slots)

    def _end_round(self) -> None:
        """Take in the times of a round, rank 0's on every rank."""
        key = self.batch_size, self.chosen.index
        if self.is_timed:
            self.fruitless.pop(key, None)
        else:
            self.fruitless.setdefault(key, FadingMean()).add(self.step, 1.0, 0.0)
        if not self.new_steps:
            return
        for step, seconds in zip(
            self.new_steps, self.share(self.new_seconds), strict=True
        ):
            known = self.times.setdefault(step.batch_size, {})
            if step.num_drafts and None in known and self._weighs(step.index):
                self.draft_costs.add(
                    self.step,
                    step.batch_size,
                    step.num_drafts,
                    seconds,
                    known[None].seconds,
                )
            if step.num_trees < step.num_reqs and step.index is not None:
                if None not in known:
                    continue
                plain = known[None].seconds
                whole = math.sqrt(step.num_reqs / step.num_trees)
                seconds = plain + (seconds - plain) * whole
            known.setdefault(step.index, StepTimes()).add(self.step, seconds)
            self._check_recalled(step.batch_size, step.index)
        self.new_steps, self.new_seconds = [], []

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

    def _best(
        self, batch_size: int, requests: RunningRequests
    ) -> tuple[Option, frozenset[int]]:
        """The option that promises the most tokens a second.

        Returns:
            it, and the slots of requests for which it is not drawn: their trees would
            cost more than they bring.

        """
        nobody: frozenset[int] = frozenset()
        plain = self._plain_times(batch_size)
        if plain is None or not requests.slots or self._is_unchecked(batch_size):
            return self.plain, nobody
        self.plain_seconds = plain.seconds
        best, left_out = self.plain, nobody
        best_rate = WORTH_A_TREE * requests.num_reqs / plain.hopeful(self.step)
        for option in self.options[1:]:
            if self._is_fruitless(batch_size, option):
                continue
            extra = self._extra_seconds(option, batch_size, plain.seconds)
            gains = self._gains(option, requests)
            tokens: float = requests.num_reqs
            num_trees = 0.0
            for count, gain in enumerate(gains[: self.max_trees], start=1):
                tokens += gain.tokens
                num_trees += gain.share
                # Fewer trees cost less, but more than their share.
                share = math.sqrt(num_trees / requests.num_reqs)
                rate = tokens / (plain.seconds + extra * share)
                if rate > best_rate:
                    best, best_rate = option, rate
                    left_out = frozenset(left.slot for left in gains[count:])
            if self._is_new(option):
                # Larger trees wait for what this one will show.
                break
        return best, left_out

    def _gains(self, option: Option, requests: RunningRequests) -> list[Gain]:
        """What each request's tree would bring; the most first."""
        hopes = {
            sampled: self.hopeful_accepted(option, sampled)
            for sampled in set(requests.sampled)
        }
        unknown = RequestHistory()
        gains = []
        for slot, sampled, limit in zip(
            requests.slots, requests.sampled, requests.limits, strict=True
        ):
            factor = self.requests.get(slot, unknown).hopeful(self.step)
            tokens = min(hopes[sampled] * factor, limit)
            gains.append(Gain(tokens, slot, option.share(limit)))
        return sorted(gains, reverse=True)

    def expected_accepted(self, option: Option, sampled: bool) -> float:
        """Tokens that will be accepted of a tree, for a request like most."""
        text = self.text[sampled].mean(self.step, 1.0, GUESSED_TEXT)
        means = self.accepted[option.index, sampled]
        return means.mean(self.step, option.guess * text, GUESSED_TREES)

    def hopeful_accepted(self, option: Option, sampled: bool) -> float:
        """What may be accepted for all we know: half a standard error more.

        The number of accepted tokens is taken as geometric.
        """
        mean = self.expected_accepted(option, sampled)
        num_trees = self.accepted[option.index, sampled].weight + GUESSED_TREES
        return mean + HOPED_ERRORS * math.sqrt(mean * (1 + mean) / num_trees)

    def _known(self, batch_size: int) -> dict[int | None, StepTimes]:
        """Times at a batch size that are not too old."""
        return {
            index: times
            for index, times in self.times.get(batch_size, {}).items()
            if times.is_known(self.step)
        }

    def _plain_times(self, batch_size: int) -> StepTimes | None:
        """Times of plain steps, of another batch size where none can be timed here."""
        known = self._known(batch_size)
        if None in known:
            return known[None]
        nearest = self._nearest(self.plain, batch_size)
        if nearest is None or not self._is_fruitless(batch_size, self.plain):
            return None
        return self.times[nearest][None]

    def _extra_seconds(self, option: Option, batch_size: int, plain: float) -> float:
        """How much longer than a plain step one with trees takes, hopefully."""
        known = self._known(batch_size)
        if option.index in known:
            return known[option.index].hopeful(self.step) - plain
        nearest = self._nearest(option, batch_size)
        if nearest is not None:
            there = self.times[nearest]
            extra = there[option.index].seconds - there[None].seconds
            ratio = batch_size / nearest
            return HOPE * max(extra, 0.0) * min(ratio, math.sqrt(math.sqrt(ratio)))
        a_draft = min(
            (
                (times.seconds - plain) / self.by_index[index].num_drafts
                for index, times in known.items()
                if index is not None
            ),
            default=0.0,
        )
        return HOPE * max(a_draft, 0.0) * option.num_drafts

    def _nearest(self, option: Option, batch_size: int) -> int | None:
        """The nearest batch size at which an option and plain steps were timed."""
        sizes = [
            size
            for size, known in self.times.items()
            if option.index in known and None in known
        ]
        return min(
            sizes,
            key=lambda s: max(s, batch_size) / min(s, batch_size),
            default=None,
        )

    def _is_new(self, option: Option) -> bool:
        """Whether an option was not timed at any batch size."""
        return not any(option.index in known for known in self.times.values())

    def _is_fruitless(self, batch_size: int, option: Option) -> bool:
        """Whether an option is not known, and could not be timed in several rounds."""
        if option.index in self._known(batch_size):
            return False
        return self._had_no_times(batch_size, option)

    def _is_unchecked(self, batch_size: int) -> bool:
        """Whether the time of plain steps is an earlier start's, and can be checked."""
        if (batch_size, None) not in self.recalled:
            return False
        return not self._had_no_times(batch_size, self.plain)

    def _had_no_times(self, batch_size: int, option: Option) -> bool:
        """Whether an option could not be timed in several rounds lately."""
        rounds = self.fruitless.get((batch_size, option.index))
        if rounds is None:
            return False
        rounds.fade(self.step)
        return rounds.weight > FRUITLESS_ROUNDS
