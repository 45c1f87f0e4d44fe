"""The adaptive scheduler: each step draws what brings most tokens a second."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from vllm_treespec.schedule.base import Schedule, ScheduledTree
from vllm_treespec.schedule.batch_sizes import size_group
from vllm_treespec.schedule.calibration import Calibration
from vllm_treespec.schedule.cost import CostModel
from vllm_treespec.schedule.forward_times import ForwardTimes
from vllm_treespec.schedule.offers import Offer, OfferMaker, times_in
from vllm_treespec.schedule.plan import (
    MAX_SLOWDOWN,
    PLAIN_PLAN,
    RunningRequests,
    StepPlan,
    StepResult,
    Work,
)
from vllm_treespec.schedule.values import OptionValues, TreeOption
from vllm_treespec.trees.source import Source

# Steps between two choices: a change costs the first of them its usual time.
ROUND_STEPS = 4
# Share of the time that is spent on options other than the best.
PROBE_SHARE = 0.01
# What a probe costs at least, in plain steps: else options as good as the best would
# take turns with it.
LEAST_LOSS = 0.1
# Standard errors by which an option may be better than estimated: what is hardly known
# is tried.
HOPED_ERRORS = 0.5
# Standard errors by which an option must come up to the best one to be probed.
PROBED_ERRORS = 2.0
# Tokens caught up on that tell what they take, in a step that is no usual one.
MANY_TOKENS = 16
# The part of what it takes longer that is left for catching up, whatever trees take.
READING_SHARE = 0.5


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
        max_slowdown: float = MAX_SLOWDOWN,
    ) -> None:
        """Begin with nothing measured.

        Args:
            trees: in any order.
            max_trees: requests that may carry a tree in one step.
            share: hands out rank 0's times, which all ranks choose by.
            can_sync: whether the host waits for what a model drafted before it reads
                on; else past steps tell the number of levels.
            max_slowdown: times a plain step that one with trees takes at most.

        """
        super().__init__(trees)
        self.share = share
        self.can_sync = can_sync
        self.options = [
            TreeOption.of_tree(index, tree) for index, tree in enumerate(trees)
        ]
        self.cost = CostModel()
        self.calibration = Calibration()
        self.values = OptionValues(self.options)
        self.maker = OfferMaker(self.values, self.cost, max_trees, max_slowdown)
        # option, batch size, sampled -> seconds that it may lose
        self.credit: defaultdict[tuple[int | None, int, bool], float] = defaultdict(
            float
        )
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
    def cuts_levels(self) -> bool:
        """Levels are as many as are worth their forwards."""
        return True

    @property
    def step(self) -> int:
        """Number of the current step."""
        return self.values.step

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
        self.maker.lives.begin(requests.slots, self.step)
        self.kinds = dict(zip(requests.slots, requests.sampled, strict=True))
        if now.steps_left <= 0 or (size, sampled) != (now.size, now.sampled):
            self._take_in()
            self._begin_round(size, sampled, requests)
        offer = self.round.offer
        assert offer is not None
        left_out = self.round.left_out
        slots = [slot for slot in requests.slots if slot not in left_out]
        plan = PLAIN_PLAN
        if offer.option is not None and slots:
            plan = self._plan_of(offer, slots, requests)
        return replace(plan, is_usual=self.round.settled)

    def _count(self, size: int, sampled: bool, num_steps: int) -> None:
        """Count steps of a batch size."""
        self.values.step += num_steps
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
        if not self.cost.fits:
            return Offer(None, num_reqs, 1.0), 0.0, 0.0
        seconds, error = self.cost.seconds(Work(num_reqs, sampled))
        plain = Offer(None, num_reqs, seconds, seconds_error=error)
        if not requests.slots:
            return plain, plain.rate, plain.rate
        best, offers = plain, self.maker.offers(requests, plain)
        if offers:
            hopeful = max(offers, key=lambda offer: offer.hopeful_rate(HOPED_ERRORS))
            if hopeful.hopeful_rate(HOPED_ERRORS) >= plain.rate:
                best = hopeful
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
            lost = max(lost, LEAST_LOSS * best.seconds)
            may_win = offer.hopeful_rate(PROBED_ERRORS) > best.rate
            if due is None and may_win and self.credit[key] >= lost:
                self.credit[key] = 0.0
                due = offer
        return due

    def _plan_of(
        self, offer: Offer, slots: Sequence[int], requests: RunningRequests
    ) -> StepPlan:
        """What drafting may spend."""
        option, now, step = offer.option, self.round, self.step
        num_reqs = requests.num_reqs
        assert option is not None
        plan = self.whole_tree(option.index, slots)
        costs = self.cost.draft_costs(num_reqs, now.sampled)
        plain = self.cost.seconds(Work(num_reqs, now.sampled)).mean
        spare = self.maker.spare(plain)
        if plan.model:
            left = spare
            if not all(requests.num_behind):
                left = max(plain + spare - offer.seconds, READING_SHARE * spare)
            plan = replace(plan, max_caught_up=times_in(left, costs.caught_up))
        if not option.prunes:
            return plan
        kept = {
            source: [
                self.calibration.kept(step, source, slot, self.kinds[slot])
                for slot in slots
            ]
            for source in Source
            if source in option.sources
        }
        survival = {
            kind: self.calibration.survival(step, kind, max(option.depth, 1))
            for kind in {self.kinds[slot] for slot in slots}
        }
        factors = [self.values.factor(option, slot, self.kinds[slot]) for slot in slots]
        by_request = [survival[self.kinds[slot]] for slot in slots]
        row_cost, level_cost = costs.row * now.rate, costs.level * now.plain_rate
        levels = self.maker.max_levels(plain, costs, len(slots))
        max_levels = min(levels, max(option.levels, 1))
        if not self.can_sync:
            worth = levels_worth_reading(by_request, factors, row_cost, level_cost)
            max_levels = min(max_levels, worth)
        others = costs.fixed + costs.branches
        if plan.model:
            usual = self.values.work(option, num_reqs, 1.0, now.sampled)
            others += min(usual.levels, max_levels) * costs.level
        return replace(
            plan,
            prunes=True,
            row_cost=row_cost,
            fixed_cost=costs.fixed * now.rate,
            branch_cost=costs.branches * now.rate,
            level_cost=level_cost,
            max_rows=max(times_in(spare - others, costs.row), len(slots)),
            kept=kept,
            first_level=[
                sum(min(level * factor, 1.0) for level in levels[: option.first_levels])
                for levels, factor in zip(by_request, factors, strict=True)
            ],
            max_levels=max_levels if plan.model else None,
        )

    def observe(self, result: StepResult) -> None:
        """Learn the time of a step, and what was accepted of its trees."""
        now, work = self.round, result.work
        num_rested = result.num_steps - 1
        now.steps_left -= num_rested
        self._count(now.size, now.sampled, num_rested)
        if self.forced_index is not None:
            return
        # While models only catch up, what an index drafts tells nothing of both.
        only_reads = work.caught_up > 0 and not work.levels
        if result.tree is not None and not only_reads:
            option = self.options[result.tree]
            self.values.observe(option, self.kinds, result)
            self.calibration.observe(self.step, self.kinds, result)
            if work.levels:
                self._observe_levels(option, result)
        is_usual = result.is_usual or work.caught_up >= MANY_TOKENS
        if result.seconds is not None and is_usual:
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
                    max(int(result.work.levels), option.first_levels),
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
        self.maker.lives.end(slots, self.step)


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
