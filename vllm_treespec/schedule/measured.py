"""A schedule that measures: each step draws what brings most tokens a second."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

from vllm_treespec.schedule.acceptance import ANY_SIZE, Acceptance
from vllm_treespec.schedule.asking import REST_ROUNDS, Asking
from vllm_treespec.schedule.base import (
    RunningRequests,
    Schedule,
    ScheduledTree,
    StepOutcome,
)
from vllm_treespec.schedule.batch_sizes import size_group
from vllm_treespec.schedule.costs import StepCosts
from vllm_treespec.schedule.learned import FadingMean
from vllm_treespec.schedule.levels import AcceptedLevels
from vllm_treespec.schedule.offers import Gain, Offer, best_offer
from vllm_treespec.schedule.options import Option, guessed_accepted
from vllm_treespec.schedule.prices import DraftParts, Prices, Promises
from vllm_treespec.schedule.timed_steps import TimedStep, TimedSteps

# Steps between two choices; the first one after a change is not timed.
ROUND_STEPS = 4
# How much faster than plain decoding a tree must promise to be. Hopes come true in part
# only, so a tree that promises less costs time in looking at it.
WORTH_A_TREE = 1.04
# Steps that a request is thought to have, before any has ended.
GUESSED_LIFE = 64.0
# Tokens that draft models catch up on in a step which tells how long that takes.
MANY_TOKENS = 16
# Rounds of a batch size in which plain steps are timed again, where a model drafts: the
# first times may be those of a cold machine, and trees are judged by them.
CHECKED_ROUNDS = (6, 24)


class MeasuredSchedule(Schedule):
    """Chooses by measured times and acceptance (docs/dev/scheduler.md).

    A choice holds for a *round* of a few steps. It is the option of the most tokens a
    second: expected tokens of a step over the step's time. What was measured long ago
    counts less, and the guess in its place is hopeful. So each option is tried again
    from time to time: soon where it is close to the best, late where it is not.

    Accepted tokens are learned for each tree, separately for greedy and for sampled
    requests. Each request has a factor of its own besides: how much more is accepted of
    its trees than of others'. Times are learned for each option and batch size, and for
    steps in which some request is sampled apart: to draw takes time.

    A request may limit its trees (docs/spec-config.md). They count for the part that
    is left in costs, for that request in acceptance, and for no other one.
    """

    def __init__(
        self,
        trees: Sequence[ScheduledTree],
        max_trees: int,
        share: Callable[[list[float]], list[float]] = lambda seconds: seconds,
        host_may_wait: bool = True,
    ) -> None:
        """Begin with nothing measured.

        Args:
            trees: in any order.
            max_trees: requests that may carry a tree in one step.
            share: hands out rank 0's times, which all ranks choose by.
            host_may_wait: whether what a model drafted may say if it reads on; else
                past steps say it, before it reads.

        """
        super().__init__(trees)
        self.max_trees = max_trees
        self.levels = None if host_may_wait else AcceptedLevels()
        has_index = any(tree.is_free for tree in trees)
        drawn = [
            Option(
                index,
                tree.sizes.max_nodes - 1,
                guessed_accepted(tree, beside_index=has_index and not tree.is_free),
                tree.is_free,
                tree.weighs_drafts,
                tree.sizes.draft_depth,
            )
            for index, tree in enumerate(trees)
        ]
        # of equal sizes, such as trees of surer drafts, later ones count as smaller
        drawn.reverse()
        drawn.sort(key=lambda o: (not o.is_free, o.num_drafts, o.guess))
        self.plain = Option(None, 0, 0.0)
        # takes the place of plain decoding where asking pays: an index says what it has
        self.free = next((option for option in drawn if option.is_free), None)
        # from the smallest to the largest
        self.options = [self.plain, *drawn]
        self.by_index = {option.index: option for option in self.options}
        # steps by batch size, for what is learned by batch size: it does not fade while
        # others run
        self.steps_at: Counter[int] = Counter()
        # rounds by batch size
        self.rounds_at: Counter[int] = Counter()
        self.acceptance = Acceptance(self.options, self.free, self.steps_at)
        # of trees whose proposers weigh drafts, and of a model's part beside an index
        self.promises, self.model_promises = Promises(), Promises()
        self.times = TimedSteps(self.options, share, host_may_wait)
        # the step in which a request decoded first, by slot
        self.begun: dict[int, int] = {}
        # steps that requests had
        self.lives = FadingMean()
        # of the requests of the last choice, by slot
        self.sampled: dict[int, bool] = {}
        # the running round
        self.batch_size = 0
        self.is_sampled = False
        self.chosen = self.plain
        # of a plain step, when the round began
        self.plain_seconds = 0.0
        # of its drafts, the same for all requests; None: not asked yet
        self.prices_of_all: Prices | None = None
        # slots of requests for which the chosen tree is not drawn
        self.left_out: frozenset[int] = frozenset()
        self.steps_left = 0
        self.is_timed = False
        # whether a step was decoded with it, or without a tree
        self.is_seen = False
        # whether the step before was of the same option, batch size and kind
        self.settled = False

    @property
    def step(self) -> int:
        """Number of the current step."""
        return self.steps_at[ANY_SIZE]

    @property
    def costs(self) -> StepCosts:
        """Times of steps such as the running round's."""
        return self.times.costs_by_kind[self.is_sampled]

    @property
    def asking(self) -> Asking:
        """What asking an index brings and takes in steps such as the round's."""
        return self.times.asking_by_kind[self.is_sampled]

    def _rest_steps(self) -> int:
        """The other steps of a plain round, unless its first one is not timed."""
        rests = self.chosen is self.plain and self.settled
        return self.steps_left - 1 if rests else 0

    def _begin_round(
        self, batch_size: int, is_sampled: bool, requests: RunningRequests
    ) -> None:
        """Draw the best option for some steps."""
        before = self.batch_size, self.is_sampled, self.chosen
        self.batch_size, self.is_sampled = batch_size, is_sampled
        self.chosen, left_out = self._best(batch_size, requests)
        self.rounds_at[batch_size] += 1
        self.settled = before == (self.batch_size, self.is_sampled, self.chosen)
        self.left_out = left_out
        self.prices_of_all = None
        self.steps_left = ROUND_STEPS
        self.is_timed = False
        self.is_seen = self.chosen is self.plain

    def _choose(self, requests: RunningRequests) -> tuple[int | None, Sequence[int]]:
        """Go on with the round, or begin one with the best option."""
        self.steps_left -= 1
        self.settled = True
        batch_size = size_group(requests.num_reqs)
        self._count_steps(batch_size, 1)
        for slot in requests.slots:
            self.begun.setdefault(slot, self.step)
        kind = batch_size, any(requests.sampled)
        if self.steps_left <= 0 or kind != (self.batch_size, self.is_sampled):
            self._end_round()
            self._begin_round(*kind, requests)
        self.costs.steps_at[batch_size] += 1
        self.sampled = dict(zip(requests.slots, requests.sampled, strict=True))
        slots = [slot for slot in requests.slots if slot not in self.left_out]
        if self.chosen is self.plain or not slots:
            return None, ()
        return self.chosen.index, slots

    def _count_steps(self, batch_size: int, num_steps: int) -> None:
        """Count steps of a batch size."""
        self.steps_at[ANY_SIZE] += num_steps
        self.steps_at[batch_size] += num_steps

    def _prices(self, slots: Sequence[int]) -> Prices | None:
        """By measured times, if the chosen tree's proposer weighs its drafts."""
        if not self.chosen.weighs_drafts:
            return None
        if self.prices_of_all is None:
            prices = self.costs.prices(self.batch_size, self.plain_seconds)
            num_levels = self._num_levels(slots, prices)
            self.prices_of_all = replace(prices, num_levels=num_levels)
        step, sampled = self.step, self.sampled
        kept = self.promises.kept_by(step, sampled, slots)
        prices = replace(self.prices_of_all, kept=kept)
        if self.free in (None, self.chosen):
            return prices
        return replace(
            prices,
            added=[
                self.acceptance.first_level(slot, self.chosen, sampled[slot])
                for slot in slots
            ],
            model_kept=self.model_promises.kept_by(step, sampled, slots),
        )

    def _num_levels(self, slots: Sequence[int], prices: Prices) -> int | None:
        """Levels that a model reads for these requests; None: it sees for itself."""
        if self.levels is None or self.chosen.index is None:
            return None
        return self.levels.worth_reading(
            self.step,
            [self.sampled[slot] for slot in slots],
            [self.acceptance.factor(slot, self.chosen).expected for slot in slots],
            prices,
            self.trees[self.chosen.index].sizes.draft_depth,
        )

    def observe(self, outcome: StepOutcome) -> None:
        """Learn the time of a step, and what was accepted of its trees."""
        forced = self.forced_index is not None
        num_rested = outcome.num_steps - 1
        self.steps_left -= num_rested
        self._count_steps(self.batch_size, num_rested)
        self.costs.steps_at[self.batch_size] += num_rested
        option = self.by_index[outcome.index]
        share = 0.0
        if option is not self.plain:
            self.is_seen |= bool(outcome.slots)
            whole_trees = sum(map(option.share, outcome.limits))
            share = whole_trees / max(outcome.num_reqs, 1)
            self.acceptance.observe(self.batch_size, option, self.sampled, outcome)
            self._observe_promises(outcome)
            if self.levels is not None:
                self.levels.observe_all(
                    self.step, self.sampled, outcome, option.num_drafts
                )
        if option is self.free and self.prices_of_all is not None:
            num_drafts, num_accepted = map(
                sum, (outcome.num_drafts, outcome.num_accepted)
            )
            gain = self.prices_of_all.gain(
                num_drafts, outcome.has_branches, num_accepted
            )
            self.asking.gained(self.batch_size, gain)
        of_option = option is self.plain or share > 0
        caught_up = outcome.num_caught_up >= MANY_TOKENS
        settled = self.settled and not caught_up
        of_use = of_option and (settled or caught_up)
        if outcome.seconds is not None and not forced and of_use:
            counts = DraftParts.of_step(
                outcome.num_levels,
                sum(outcome.num_drafts),
                outcome.num_caught_up,
                outcome.has_branches,
            )
            step = TimedStep(
                self.batch_size,
                self.is_sampled,
                option,
                share,
                counts,
                settled,
                outcome.num_steps,
            )
            self.times.add(step, outcome.seconds, outcome.drafting_seconds)
            self.is_timed |= settled

    def _observe_promises(self, outcome: StepOutcome) -> None:
        """Learn what was accepted of the tokens that trees promised."""
        step, sampled, slots = self.step, self.sampled, outcome.slots
        kept = outcome.num_kept or outcome.num_accepted
        self.promises.observe_all(step, sampled, slots, outcome.promised, kept)
        if outcome.model_promised:
            self.model_promises.observe_all(
                step, sampled, slots, outcome.model_promised, outcome.model_kept
            )

    def forget(self, slots: Sequence[int]) -> None:
        """Forget requests that ended; their slots will be other requests'."""
        self.promises.forget(slots)
        self.model_promises.forget(slots)
        self.acceptance.forget(slots)
        for slot in slots:
            life = self.step - self.begun.pop(slot, self.step)
            # What ends with its first token tells nothing of others.
            if life:
                self.lives.add(self.step, 1.0, life)
        self.left_out -= set(slots)

    def _end_round(self) -> None:
        """Take in the times of a round, rank 0's on every rank."""
        # Requests that ended at once tell nothing.
        if self.is_seen:
            self.costs.end_round(self.batch_size, self.chosen, self.is_timed)
        self.times.take_in()

    def _best(
        self, batch_size: int, requests: RunningRequests
    ) -> tuple[Option, frozenset[int]]:
        """The option that promises the most tokens a second, or one to time again.

        Returns:
            it, and the slots of requests for which it is not drawn.

        """
        nobody: frozenset[int] = frozenset()
        plain = self.costs.plain(batch_size)
        unchecked = self.costs.is_unchecked(batch_size)
        if plain is None or not requests.slots or unchecked:
            return self.plain, nobody
        self.plain_seconds = plain.seconds
        self.costs.borrow(batch_size, self.times.costs_by_kind[not self.is_sampled])
        num_reqs = requests.num_reqs
        plainly = Offer(
            WORTH_A_TREE * num_reqs / plain.hopeful,
            num_reqs / plain.seconds,
            self.plain,
        )
        offers = self._offers(batch_size, requests)
        best = max([plainly, *offers], key=lambda offer: offer.rate)
        rival: Offer | None = plainly
        if best.option in (self.plain, self.free):
            others = [offer for offer in offers if offer.option is not self.free]
            rival = max(others, key=lambda offer: offer.likely, default=None)
        if rival is not None and self._is_due(batch_size, requests, rival, best):
            return rival.option, rival.left_out
        if self.free is not None and best.option in (self.plain, self.free):
            asked = self.asking.pays(batch_size, plain.seconds)
            asked |= self.rounds_at[batch_size] % REST_ROUNDS == 0
            return self.free if asked else self.plain, nobody
        if self.rounds_at[batch_size] in CHECKED_ROUNDS:
            return self.plain, nobody
        return best.option, best.left_out

    def _offers(self, batch_size: int, requests: RunningRequests) -> list[Offer]:
        """What each option promises, from the smallest to the largest."""
        offers = []
        plain = self.plain_seconds
        for option in self.options[1:]:
            if self.costs.is_fruitless(batch_size, option.index):
                continue
            offer = best_offer(
                option,
                self._gains(batch_size, option, requests),
                requests.num_reqs,
                self.max_trees,
                plain,
                self.costs.extra_seconds(batch_size, option.index, plain),
                self.costs.is_timed(batch_size, option.index),
            )
            offers.append(offer)
            if self.costs.is_new(option.index):
                # Larger trees wait for what this one will show.
                break
        return offers

    def _is_due(
        self, batch_size: int, requests: RunningRequests, rival: Offer, best: Offer
    ) -> bool:
        """Whether an option that is not the best should be timed again."""
        lost = ROUND_STEPS * max(1 - rival.likely / best.likely, 0.0)
        if rival.option.num_levels:
            each = self.costs.caught_up_seconds(batch_size, self.plain_seconds)
            lost += each * sum(requests.num_behind) / self.plain_seconds
        return self.costs.is_due(
            batch_size, best.option.index, rival.option.index, lost
        )

    def _gains(
        self, batch_size: int, option: Option, requests: RunningRequests
    ) -> list[Gain]:
        """What each request's tree would bring; the most first.

        The longer a draft model takes to catch up, the less counts what is only hoped.
        """
        parts = self.acceptance.parts(option)
        of_text = {
            (part, sampled): self.acceptance.of_text(batch_size, part, sampled)
            for sampled in set(requests.sampled)
            for part in parts
        }
        behind = 0.0
        if not option.is_free and any(requests.num_behind):
            behind = self.costs.caught_up_seconds(batch_size, self.plain_seconds)
        life = self.lives.mean(self.step, GUESSED_LIFE, 1.0)
        gains = []
        for slot, sampled, limit, num_behind in zip(
            requests.slots,
            requests.sampled,
            requests.limits,
            requests.num_behind,
            strict=True,
        ):
            hoped = expected = 0.0
            for part in parts:
                of_most = of_text[part, sampled]
                factor = self.acceptance.factor(slot, part)
                expected += of_most.expected * factor.expected
                hoped += of_most.hopeful * factor.hopeful
            seconds = behind * num_behind
            caution = 1 + seconds / self.plain_seconds
            tokens = min(expected + (hoped - expected) / caution, limit)
            # It goes on as long as others, or as it did so far.
            num_steps = max(self.step - self.begun[slot], life)
            share = option.share(limit)
            gains.append(Gain(tokens, slot, share, seconds / num_steps, expected))
        return sorted(gains, reverse=True)
