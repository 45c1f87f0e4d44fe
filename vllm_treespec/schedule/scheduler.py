"""The adaptive scheduler: each step draws what brings most tokens a second."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from vllm_treespec.schedule.base import Schedule, ScheduledTree
from vllm_treespec.schedule.batch_sizes import size_group
from vllm_treespec.schedule.calibration import Calibration
from vllm_treespec.schedule.cost import CostModel
from vllm_treespec.schedule.decay import DecayedMean
from vllm_treespec.schedule.forward_times import ForwardTimes
from vllm_treespec.schedule.plan import (
    PLAIN_PLAN,
    RunningRequests,
    StepPlan,
    StepResult,
    Work,
)
from vllm_treespec.schedule.values import ANY_SIZE, OptionValues, TreeOption
from vllm_treespec.trees.source import Source

# Steps between two choices: a change costs the first of them its usual time.
ROUND_STEPS = 4
# Share of the time that is spent on options other than the best.
PROBE_SHARE = 0.01
# What a probe costs at least, in plain steps: else options as good as the best would
# take turns with it.
LEAST_LOSS = 0.1
# How much faster than plain decoding an option must be: the best of several estimates
# is too high.
WORTH_A_TREE = 1.02
# Standard errors by which an option may be better than estimated, and the least part
# of its time: what is hardly known is tried.
HOPED_ERRORS, LEAST_HOPED = 0.5, 0.5
# Standard errors by which an option must come up to the best one to be probed.
PROBED_ERRORS = 2.0
# Rounds without a timed plain step after which those of another batch size count.
MOST_UNTIMED = 3
# Steps of a request before any has ended.
PRIOR_LIFE = 64.0
# Tokens caught up on that tell what they take, in a step that is no usual one.
MANY_TOKENS = 16


class Gain(NamedTuple):
    """What a request's tree brings."""

    # accepted tokens, see ``TokenEstimate``
    tokens: float
    error: float
    own_variance: float
    slot: int
    # of a whole tree
    share: float
    # tokens that draft models are behind, and the part of them for each of the steps
    # that the request goes on
    behind: float
    behind_a_step: float


@dataclass(frozen=True)
class Offer:
    """An option, drawn for as many requests as bring the most tokens a second."""

    # None: plain
    option: TreeOption | None
    # of a step
    tokens: float
    seconds: float
    # the standard errors of both
    tokens_error: float = 0.0
    seconds_error: float = 0.0
    slots: Sequence[int] = ()
    # seconds that draft models take now for the tokens that they are behind
    catching_up: float = 0.0

    @property
    def tree(self) -> int | None:
        """Index of the tree; None: plain."""
        return None if self.option is None else self.option.index

    @property
    def sources(self) -> Source:
        """What drafts it; nothing where it is plain."""
        return Source(0) if self.option is None else self.option.sources

    @property
    def rate(self) -> float:
        """Tokens a second."""
        return self.tokens / self.seconds

    def hopeful_rate(self, errors: float) -> float:
        """The same if tokens and time are so many standard errors better."""
        tokens = self.tokens + errors * self.tokens_error
        seconds = self.seconds - errors * self.seconds_error
        return tokens / max(seconds, LEAST_HOPED * self.seconds)


@dataclass
class Round:
    """The running round: some steps with one choice."""

    size: int = 0
    sampled: bool = False
    offer: Offer | None = None
    # tokens a second that time is worth, and those of plain steps
    rate: float = 0.0
    plain_rate: float = 0.0
    steps_left: int = 0
    # slots of requests for which the offer is not drawn
    left_out: frozenset[int] = frozenset()
    # whether the step before was of the same choice and batch size
    settled: bool = False


class AdaptiveScheduler(Schedule):
    """Maximises tokens a second: expected tokens of a step over its expected time.

    A choice holds for a round of a few steps. Any other option has a small share of the
    time, and is drawn when that share pays for its expected loss.
    """

    def __init__(
        self,
        trees: Sequence[ScheduledTree],
        max_trees: int,
        share: Callable[[list[float]], list[float]] = lambda seconds: seconds,
        can_sync: bool = True,
    ) -> None:
        """Begin with nothing measured.

        Args:
            trees: in any order.
            max_trees: requests that may carry a tree in one step.
            share: hands out rank 0's times, which all ranks choose by.
            can_sync: whether the host waits for what a model drafted before it reads
                on; else past steps tell the number of levels.

        """
        super().__init__(trees)
        self.max_trees = max_trees
        self.share = share
        self.can_sync = can_sync
        self.options = [
            TreeOption.of_tree(index, tree) for index, tree in enumerate(trees)
        ]
        self.steps: Counter[int] = Counter()
        self.cost = CostModel()
        self.calibration = Calibration()
        self.values = OptionValues(self.options, self.steps)
        # batch size, sampled -> rounds in which plain steps were not timed
        self.untimed: Counter[tuple[int, bool]] = Counter()
        # option, batch size, sampled -> seconds that it may lose
        self.credit: defaultdict[tuple[int | None, int, bool], float] = defaultdict(
            float
        )
        # the step in which a request decoded first, by slot
        self.begun: dict[int, int] = {}
        # steps that requests had
        self.lives = DecayedMean()
        # whether requests of the last plan are sampled, by slot
        self.kinds: dict[int, bool] = {}
        self.round = Round()
        # steps of this round that were timed, and their seconds
        self.timed: list[Work] = []
        self.timed_seconds: list[float] = []

    def begin_with(self, forwards: ForwardTimes) -> None:
        """Begin with forwards that the start has timed."""
        self.cost.begin_with(forwards)

    @property
    def step(self) -> int:
        """Number of the current step."""
        return self.steps[ANY_SIZE]

    def _rest_steps(self) -> int:
        """The other steps of a plain round, unless its first one is not timed."""
        now = self.round
        is_plain = now.offer is not None and now.offer.option is None
        return now.steps_left - 1 if is_plain and now.settled else 0

    def _plan(self, requests: RunningRequests) -> StepPlan:
        """Go on with the round, or begin one with the best option."""
        now = self.round
        now.steps_left -= 1
        now.settled = True
        size, sampled = size_group(requests.num_reqs), any(requests.sampled)
        self._count(size, sampled, 1)
        for slot in requests.slots:
            self.begun.setdefault(slot, self.step)
        self.kinds = dict(zip(requests.slots, requests.sampled, strict=True))
        if now.steps_left <= 0 or (size, sampled) != (now.size, now.sampled):
            self._take_in()
            self._begin_round(size, sampled, requests)
        offer = self.round.offer
        assert offer is not None
        left_out = self.round.left_out
        slots = [slot for slot in requests.slots if slot not in left_out]
        if offer.option is None or not slots:
            return PLAIN_PLAN
        return self._plan_of(offer.option, slots, requests.num_reqs)

    def _count(self, size: int, sampled: bool, num_steps: int) -> None:
        """Count steps of a batch size."""
        self.steps[ANY_SIZE] += num_steps
        self.steps[size] += num_steps
        self.cost.count(size, sampled, num_steps)

    def _begin_round(self, size: int, sampled: bool, requests: RunningRequests) -> None:
        """Choose for some steps."""
        before = self.round
        offer, rate, plain_rate = self._choose(size, sampled, requests)
        is_same = before.offer is not None and before.offer.option is offer.option
        # A plain step is like any other plain one before it.
        settled = is_same and (
            offer.option is None or (size, sampled) == (before.size, before.sampled)
        )
        left_out = frozenset(requests.slots) - frozenset(offer.slots)
        self.round = Round(
            size, sampled, offer, rate, plain_rate, ROUND_STEPS, left_out, settled
        )

    def _choose(
        self, size: int, sampled: bool, requests: RunningRequests
    ) -> tuple[Offer, float, float]:
        """The best offer, or one to probe; tokens a second of the best, and plain."""
        num_reqs = requests.num_reqs
        if not self.cost.knows_plain(num_reqs, sampled):
            self.untimed[size, sampled] += 1
            if self.untimed[size, sampled] <= MOST_UNTIMED or not self.cost.fits:
                return Offer(None, num_reqs, 1.0), 0.0, 0.0
        seconds, error = self.cost.seconds(Work(num_reqs, sampled))
        plain = Offer(None, num_reqs, seconds, seconds_error=error)
        if not requests.slots:
            return plain, plain.rate, plain.rate
        token = self.cost.draft_costs(num_reqs, sampled).caught_up
        offers = [
            self._offer(option, size, requests, token, token / seconds)
            for option in self.options
        ]
        best = max(offers, key=lambda offer: offer.hopeful_rate(HOPED_ERRORS))
        if best.hopeful_rate(HOPED_ERRORS) < WORTH_A_TREE * plain.rate:
            best = plain
        probe = self._probe(size, sampled, [plain, *offers], best)
        return probe or best, best.rate, plain.rate

    def _probe(
        self, size: int, sampled: bool, offers: Sequence[Offer], best: Offer
    ) -> Offer | None:
        """An option whose share of the time pays for its expected loss."""
        time = ROUND_STEPS * best.seconds * PROBE_SHARE / max(len(offers) - 1, 1)
        due: Offer | None = None
        for offer in offers:
            if offer.option is best.option:
                continue
            key = offer.tree, size, sampled
            self.credit[key] += time
            lost = ROUND_STEPS * (offer.seconds - offer.tokens / best.rate)
            lost = max(lost, LEAST_LOSS * best.seconds) + offer.catching_up
            # A text's change is not seen in a source that the best option lacks.
            may_win = offer.hopeful_rate(PROBED_ERRORS) > best.rate
            may_win |= bool(offer.sources & ~best.sources)
            if due is None and may_win and self.credit[key] >= lost:
                self.credit[key] = 0.0
                due = offer
        return due

    def _offer(
        self,
        option: TreeOption,
        size: int,
        requests: RunningRequests,
        token: float,
        in_steps: float,
    ) -> Offer:
        """Draw an option for as many requests as bring the most tokens a second.

        Args:
            option: that is drawn.
            size: the batch size's group.
            requests: that run.
            token: seconds of one that draft models are behind.
            in_steps: the same in plain steps.

        """
        num_reqs, sampled = requests.num_reqs, any(requests.sampled)
        gains = self._gains(option, size, requests, in_steps)[: self.max_trees]
        best: Offer | None = None
        counts = counts_up_to(len(gains))
        # An index prunes by itself what is worth no row.
        for count in counts[-1:] if option.index_only and option.prunes else counts:
            drawn = gains[:count]
            tokens = num_reqs + sum(gain.tokens for gain in drawn)
            num_trees = sum(gain.share for gain in drawn)
            work = self.values.work(size, option, num_reqs, num_trees, sampled)
            seconds, error = self.cost.seconds(work)
            seconds += token * sum(gain.behind_a_step for gain in drawn)
            if best is None or tokens / seconds > best.rate:
                best = Offer(
                    option,
                    tokens,
                    seconds,
                    sum(gain.error for gain in drawn)
                    + math.sqrt(sum(gain.own_variance for gain in drawn)),
                    error,
                    [gain.slot for gain in drawn],
                    token * sum(gain.behind for gain in drawn),
                )
        assert best is not None
        if option.index_only and option.prunes:
            # Where its drafts are worth no row, none is drawn.
            nothing = self.cost.seconds(Work(num_reqs, sampled, lookup=1.0))
            if num_reqs / nothing.mean > best.rate:
                best = replace(best, tokens=num_reqs, seconds=nothing.mean)
        return best

    def _gains(
        self, option: TreeOption, size: int, requests: RunningRequests, token: float
    ) -> list[Gain]:
        """What each request's tree brings; the most first.

        Args:
            option: that is drawn.
            size: the batch size's group.
            requests: that run.
            token: what one takes that draft models are behind, in plain steps.

        """
        life = self.lives.mean(self.step, PRIOR_LIFE, 1.0)
        gains = []
        for slot, sampled, limit, behind in zip(
            requests.slots,
            requests.sampled,
            requests.limits,
            requests.num_behind,
            strict=True,
        ):
            tokens = self.values.tokens(size, option, slot, sampled)
            share = min(limit / option.num_drafts, 1.0)
            unread = 0.0 if option.index_only else float(behind)
            # It goes on as long as others, or as it did so far.
            num_steps = max(self.step - self.begun[slot], life)
            # Tokens that are read for a hope alone are lost.
            caution = 1.0 + unread * token
            gains.append(
                Gain(
                    min(tokens.mean, limit),
                    tokens.error / caution,
                    tokens.own_variance / (caution * caution),
                    slot,
                    share,
                    unread,
                    unread / num_steps,
                )
            )
        return sorted(gains, reverse=True)

    def _plan_of(
        self, option: TreeOption, slots: Sequence[int], num_reqs: int
    ) -> StepPlan:
        """What drafting may spend."""
        whole = self.whole_tree(option.index, slots)
        if not option.prunes:
            return whole
        now, step = self.round, self.step
        costs = self.cost.draft_costs(num_reqs, now.sampled)
        kept = {
            source: [
                self.calibration.kept(step, source, slot, self.kinds[slot])
                for slot in slots
            ]
            for source in Source
            if source in option.sources
        }
        survival = {
            kind: self.calibration.survival(step, kind, max(option.levels, 1))
            for kind in {self.kinds[slot] for slot in slots}
        }
        factors = [self.values.factor(option, slot, self.kinds[slot]) for slot in slots]
        by_request = [survival[self.kinds[slot]] for slot in slots]
        row_cost, level_cost = costs.row * now.rate, costs.level * now.plain_rate
        max_levels = None
        if whole.model and not self.can_sync:
            max_levels = levels_worth_reading(by_request, factors, row_cost, level_cost)
        return replace(
            whole,
            prunes=True,
            row_cost=row_cost,
            fixed_cost=costs.fixed * now.rate,
            branch_cost=costs.branches * now.rate,
            level_cost=level_cost,
            kept=kept,
            first_level=[
                min(levels[0] * factor, 1.0)
                for levels, factor in zip(by_request, factors, strict=True)
            ],
            max_levels=max_levels,
        )

    def observe(self, result: StepResult) -> None:
        """Learn the time of a step, and what was accepted of its trees."""
        now, work = self.round, result.work
        num_rested = result.num_steps - 1
        now.steps_left -= num_rested
        self._count(now.size, now.sampled, num_rested)
        if result.tree is not None and self.forced_index is None:
            option = self.options[result.tree]
            self.values.observe(now.size, option, self.kinds, result)
            self.calibration.observe(self.step, self.kinds, result)
            if work.levels:
                self._observe_levels(option, result)
        is_told = now.settled or work.caught_up >= MANY_TOKENS
        if result.seconds is not None and is_told and self.forced_index is None:
            self.timed.append(work)
            self.timed_seconds += [result.seconds, result.drafting_seconds]

    def _observe_levels(self, option: TreeOption, result: StepResult) -> None:
        """Learn how deep what a model drafted was accepted."""
        claimed = result.claimed.get(Source.INDEX, [0.0] * len(result.slots))
        for slot, accepted, of_index, limit in zip(
            result.slots, result.num_accepted, claimed, result.limits, strict=True
        ):
            # What a model adds is seen where the index found nothing.
            if slot in self.kinds and limit >= option.num_drafts and not of_index:
                self.calibration.observe_levels(
                    self.step,
                    self.kinds[slot],
                    int(result.work.levels),
                    accepted,
                )

    def _take_in(self) -> None:
        """Learn from the timed steps of a round, by rank 0's times on every rank."""
        if not self.timed:
            return
        shared = self.share(self.timed_seconds)
        for work, seconds, drafting in zip(
            self.timed, shared[::2], shared[1::2], strict=True
        ):
            self.cost.observe(work, seconds, drafting if self.can_sync else 0.0)
        self.timed, self.timed_seconds = [], []

    def forget(self, slots: Sequence[int]) -> None:
        """Forget requests that ended; their slots will be other requests'."""
        self.calibration.forget(slots)
        self.values.forget(slots)
        for slot in slots:
            life = self.step - self.begun.pop(slot, self.step)
            # What ends with its first token tells nothing of others.
            if life:
                self.lives.add(self.step, 1.0, life)


def counts_up_to(most: int) -> list[int]:
    """Numbers of requests that are compared: 1, 2, 3, 4, 6, 8, 12, and so on."""
    powers = [1 << exponent for exponent in range(most.bit_length())]
    counts = {count for power in powers for count in (power, 3 * power // 2)}
    return sorted({most, *(count for count in counts if count < most)})


def levels_worth_reading(
    survival: Sequence[Sequence[float]],
    factors: Sequence[float],
    row_cost: float,
    level_cost: float,
) -> int:
    """Levels down to the first that is not worth its forward; at least one.

    Args:
        survival: of each request, how often each level is accepted.
        factors: how much more is accepted of its trees than of others'.
        row_cost: of a draft, in tokens.
        level_cost: of a level, in tokens.

    """
    depth = len(survival[0])
    for level in range(1, depth):
        gains = [
            max(min(levels[level] * factor, 1.0) - row_cost, 0.0)
            for levels, factor in zip(survival, factors, strict=True)
        ]
        if sum(gains) <= level_cost:
            return level
    return depth
