"""Offers: what each option brings, drawn for how many requests, and what it takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from vllm_treespec.schedule.cost import CostModel, DraftCosts
from vllm_treespec.schedule.decay import DecayedMean
from vllm_treespec.schedule.plan import RunningRequests, Work
from vllm_treespec.schedule.values import OptionValues, TreeOption

# Standard errors by which a step may be shorter than estimated, where it is compared
# with the longest one allowed: what is hardly known is tried.
FITTING_ERRORS = 1.0
# Steps of a request before any has ended.
PRIOR_LIFE = 64.0
# What has no cost fits so often: fits into any integer, too.
MOST_TIMES = 2**31
# The least part of an offer's time that it may turn out to take.
LEAST_HOPED = 0.5


class Gain(NamedTuple):
    """What a request's tree brings."""

    # accepted tokens, and their standard error
    tokens: float
    error: float
    slot: int
    # of a whole tree
    share: float
    # tokens that draft models are behind, for each of the steps that it goes on
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

    @property
    def tree(self) -> int | None:
        """Index of the tree; None: plain."""
        return None if self.option is None else self.option.index

    @property
    def rate(self) -> float:
        """Tokens a second."""
        return self.tokens / self.seconds

    def hopeful_rate(self, errors: float) -> float:
        """The same if tokens and time are so many standard errors better."""
        tokens = self.tokens + errors * self.tokens_error
        seconds = self.seconds - errors * self.seconds_error
        return tokens / max(seconds, LEAST_HOPED * self.seconds)


class Lives:
    """Steps that requests go on for: as long as others did, or as they did so far."""

    def __init__(self) -> None:
        """Begin without requests."""
        # the step in which a request decoded first, by slot
        self.begun: dict[int, int] = {}
        # steps that requests had
        self.ended = DecayedMean()

    def begin(self, slots: Sequence[int], step: int) -> None:
        """Note requests that run in a step."""
        for slot in slots:
            self.begun.setdefault(slot, step)

    def left(self, slots: Sequence[int], step: int) -> list[float]:
        """Steps that each of these requests goes on for."""
        usual = self.ended.mean(step, PRIOR_LIFE, 1.0)
        return [max(step - self.begun[slot], usual) for slot in slots]

    def end(self, slots: Sequence[int], step: int) -> None:
        """Note requests that ended; their slots will be other requests'."""
        for slot in slots:
            life = step - self.begun.pop(slot, step)
            # What ends with its first token tells nothing of others.
            if life:
                self.ended.add(step, 1.0, life)


class OfferMaker:
    """Draws each option for as many requests as bring the most tokens a second.

    A step with trees takes at most ``max_slowdown`` times a plain one. Where the trees
    of all requests take longer, those are drawn that bring the most.
    """

    def __init__(
        self,
        values: OptionValues,
        cost: CostModel,
        max_trees: int,
        max_slowdown: float,
    ) -> None:
        """Take the estimators, and the limits of a step."""
        self.values = values
        self.cost = cost
        self.max_trees = max_trees
        self.max_slowdown = max_slowdown
        self.lives = Lives()

    def offers(self, requests: RunningRequests, plain: Offer) -> list[Offer]:
        """One for each option that a step has time for.

        Args:
            requests: that run, some of which may draft.
            plain: of a plain step.

        """
        sampled = any(requests.sampled)
        costs = self.cost.draft_costs(requests.num_reqs, sampled)
        made = [
            self._offer(option, requests, plain, costs)
            for option in self.values.options
        ]
        return [offer for offer in made if offer is not None]

    def spare(self, plain: float) -> float:
        """Seconds that a step may take longer than a plain one of these seconds."""
        return (self.max_slowdown - 1.0) * plain

    def max_levels(self, plain: float, costs: DraftCosts, num_trees: int) -> int:
        """Levels that fit into spare time beside a row of each tree; at least one.

        Args:
            plain: seconds of a plain step.
            costs: of parts of drafting.
            num_trees: of the step.

        """
        others = costs.fixed + costs.branches + num_trees * costs.row
        return times_in(self.spare(plain) - others, costs.level)

    def _offer(
        self,
        option: TreeOption,
        requests: RunningRequests,
        plain: Offer,
        costs: DraftCosts,
    ) -> Offer | None:
        """The best number of requests for an option; None: a step lacks the time.

        Args:
            option: that is drawn.
            requests: that run.
            plain: of a plain step.
            costs: of parts of drafting.

        """
        num_reqs, sampled = requests.num_reqs, any(requests.sampled)
        token = costs.caught_up
        gains = self._gains(option, requests, token / plain.seconds)
        most = self.max_slowdown * plain.seconds
        prunes_alone = option.index_only and option.prunes
        best: Offer | None = None
        for count in reversed(counts_up_to(min(len(gains), self.max_trees))):
            drawn = gains[:count]
            num_trees = sum(gain.share for gain in drawn)
            work = self.values.work(option, num_reqs, num_trees, sampled)
            if option.prunes:
                levels = self.max_levels(plain.seconds, costs, count)
                work = work._replace(levels=min(work.levels, levels))
            seconds, error = self.cost.seconds(work)
            if seconds - FITTING_ERRORS * error > most:
                continue
            tokens = num_reqs + sum(gain.tokens for gain in drawn)
            seconds += token * sum(gain.behind_a_step for gain in drawn)
            if best is None or tokens / seconds >= best.rate:
                best = Offer(
                    option,
                    tokens,
                    seconds,
                    sum(gain.error for gain in drawn),
                    error,
                    [gain.slot for gain in drawn],
                )
            # An index prunes by itself what is worth no row.
            if prunes_alone:
                break
        if best is not None and prunes_alone:
            # Where its drafts are worth no row, none is drawn.
            nothing = self.cost.seconds(Work(num_reqs, sampled, lookup=1.0))
            if num_reqs / nothing.mean > best.rate:
                best = replace(best, tokens=num_reqs, seconds=nothing.mean)
        return best

    def _gains(
        self, option: TreeOption, requests: RunningRequests, token: float
    ) -> list[Gain]:
        """What each request's tree brings; the most first.

        Args:
            option: that is drawn.
            requests: that run.
            token: what one takes that draft models are behind, in plain steps.

        """
        steps_left = self.lives.left(requests.slots, self.values.step)
        gains = []
        for slot, sampled, limit, behind, num_steps in zip(
            requests.slots,
            requests.sampled,
            requests.limits,
            requests.num_behind,
            steps_left,
            strict=True,
        ):
            tokens = self.values.tokens(option, slot, sampled)
            share = min(limit / option.num_drafts, 1.0)
            unread = 0.0 if option.index_only else float(behind)
            # Tokens that are read for a hope alone are lost.
            caution = 1.0 + unread * token
            gains.append(
                Gain(
                    min(tokens.mean, limit),
                    tokens.error / caution,
                    slot,
                    share,
                    unread / num_steps,
                )
            )
        return sorted(gains, reverse=True)


def times_in(seconds: float, each: float) -> int:
    """How often something fits into this time, at least once."""
    return min(max(int(seconds / each), 1), MOST_TIMES) if each else MOST_TIMES


def counts_up_to(most: int) -> list[int]:
    """Numbers of requests that are compared: 1, 2, 3, 4, 6, 8, 12, and so on."""
    powers = [1 << exponent for exponent in range(most.bit_length())]
    counts = {count for power in powers for count in (power, 3 * power // 2)}
    return sorted({most, *(count for count in counts if count < most)})
