"""What a step takes: one linear model with a prior, forgetting and a pace.

Only additions, products, quotients and square roots: they give the same bits on any
processor, so that all ranks compute alike.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from vllm_treespec.schedule.batch_sizes import nearest_size, size_group
from vllm_treespec.schedule.decay import left_after
from vllm_treespec.schedule.forward_times import MORE_ROWS, NOT_TIMED, ForwardTimes
from vllm_treespec.schedule.plan import Estimate, Work

# Relative error of one measured time: quiet machines have 3 %, shared ones 10 %.
ERROR = 0.08
# What the machine's speed changes in a step, as a share: 20 % in 100 steps.
PACE_STEP = 0.02
# Steps of a batch size after which a third of what they taught is left.
COST_MEMORY = 2048
# A time counts up to so many standard errors above the expected one: other work makes
# steps longer, never shorter.
MOST_ERRORS = 3.0


class Terms(NamedTuple):
    """The terms of a step's time: counts, seconds, or factors of each."""

    # a plain step
    base: float = 0.0
    # the target's forward, for the rows of drafts
    rows: float = 0.0
    # any drafts at all
    fixed: float = 0.0
    branches: float = 0.0
    lookup: float = 0.0
    # a level that draft models read, and a token that they catch up on
    level: float = 0.0
    caught_up: float = 0.0


NUM_TERMS = len(Terms._fields)
# Terms of which drafting consists, where its own time is known.
DRAFTING = Terms(lookup=1.0, level=1.0, caught_up=1.0)
# What a term takes before it was measured, as a share of a plain step: forwards timed
# at start take the place of rows, levels and tokens.
PRIOR = Terms(1.0, 1.0, 0.08, 0.04, 0.03, 0.15, 0.01)
# Standard error of that, as a factor. A forward timed at start lacks its context.
DOUBT = Terms(0.3, 0.5, 1.0, 1.0, 1.0, 1.0, 1.0)
# A row of an untimed target costs half of what one of 16 others and it take.
UNTIMED_ROW, UNTIMED_ROWS = 0.5, 16
# The part of that which a row takes beside a timed forward: the host's work, and rows
# beyond those that were timed.
HOST_ROW = 0.1
# The least factors of the terms: two noisy steps must not make rows free, timed ones
# least of all.
LEAST = Terms(*[0.05] * NUM_TERMS)
LEAST_IF_TIMED = LEAST._replace(rows=0.5)
# Covariance of factors of which nothing was measured.
PRIOR_COVARIANCE = tuple(
    tuple(doubt * doubt if row == column else 0.0 for column in range(NUM_TERMS))
    for row, doubt in enumerate(DOUBT)
)


class DraftCosts(NamedTuple):
    """Seconds that parts of drafting add to a step."""

    row: float
    fixed: float
    branches: float
    level: float
    caught_up: float


@dataclass
class Fit:
    """Factors of the terms at one batch size, and their covariance.

    Between steps they return slowly to the prior, a plain step's only in its doubt (an
    Ornstein-Uhlenbeck process); a measured time moves them by a Kalman filter's gain.

    Attributes:
        plain: seconds of a plain step that the terms' priors are shares of.
        factors: by term.
        covariance: of the factors, by term and term.
        step: up to which both were brought.

    """

    plain: float
    factors: list[float]
    covariance: list[list[float]]
    step: int = 0

    @classmethod
    def new(cls, plain: float) -> Fit:
        """Begin with the prior."""
        return cls(plain, [1.0] * NUM_TERMS, toward_prior(PRIOR_COVARIANCE, 0.0))

    def inherit(self, plain: float) -> Fit:
        """Begin another batch size with what this one taught, and half its doubt."""
        covariance = toward_prior(self.covariance, 0.5)
        return Fit(plain, [1.0, *self.factors[1:]], covariance)

    def forget(self, step: int) -> None:
        """Return to the prior by the steps since the last one."""
        if step == self.step:
            return
        left = left_after(step - self.step, COST_MEMORY)
        self.step = step
        base, *others = self.factors
        self.factors = [base, *(1.0 + (factor - 1.0) * left for factor in others)]
        self.covariance = toward_prior(self.covariance, left * left)

    def times(self, counts: Sequence[float]) -> list[float]:
        """The covariance times a vector."""
        return [dot(row, counts) for row in self.covariance]

    def correct(
        self, direction: Sequence[float], gain: float, share: float, least: Terms
    ) -> None:
        """Move the factors along a direction, and shrink their covariance.

        Args:
            direction: the covariance times the seconds of the terms.
            gain: of the factors.
            share: of the covariance's outer product.
            least: factors at least.

        """
        self.factors = [
            max(factor + gain * d, low)
            for factor, d, low in zip(self.factors, direction, least, strict=True)
        ]
        for row, a in zip(self.covariance, direction, strict=True):
            for column, b in enumerate(direction):
                row[column] -= share * a * b


def toward_prior(
    covariance: Sequence[Sequence[float]], left: float
) -> list[list[float]]:
    """A covariance of which so much is left, and the prior's has the other part."""
    return [
        [a * left + b * (1.0 - left) for a, b in zip(row, of_prior, strict=True)]
        for row, of_prior in zip(covariance, PRIOR_COVARIANCE, strict=True)
    ]


def dot(one: Sequence[float], other: Sequence[float]) -> float:
    """The sum of products of two vectors."""
    return sum(a * b for a, b in zip(one, other, strict=True))


class CostModel:
    """Seconds of a step, linear in what it does.

    Each batch size and kind (greedy, or with sampled requests) has its factors, which
    begin with those of the nearest one. One pace stands for the machine's speed at this
    time: it changes the time of all of them.
    """

    def __init__(self) -> None:
        """Begin with nothing measured."""
        self.forwards = NOT_TIMED
        # batch size, sampled -> factors
        self.fits: dict[tuple[int, bool], Fit] = {}
        # steps so far, by batch size and kind
        self.steps: Counter[tuple[int, bool]] = Counter()
        # of all steps, and its relative variance
        self.pace, self.pace_variance = 1.0, 0.0

    def begin_with(self, forwards: ForwardTimes) -> None:
        """Take the forwards that the start has timed."""
        self.forwards = forwards

    def seconds(self, work: Work) -> Estimate:
        """What a step takes.

        Raises:
            LookupError: nothing was timed yet.

        """
        fit = self._known_fit(work)
        terms = self._terms(work, fit)
        variance, mean = dot(terms, fit.times(terms)), dot(terms, fit.factors)
        return Estimate(self.pace * mean, self.pace * math.sqrt(max(variance, 0.0)))

    def draft_costs(self, requests: int, sampled: bool) -> DraftCosts:
        """What a row, any drafts, branches, a level and a token to catch up on add."""
        work = Work(requests, sampled, MORE_ROWS, 1.0, 1.0, 1.0, 1.0, 1.0)
        fit = self._known_fit(work)
        parts = Terms(
            *(
                self.pace * a * b
                for a, b in zip(self._terms(work, fit), fit.factors, strict=True)
            )
        )
        return DraftCosts(
            parts.rows / MORE_ROWS,
            parts.fixed,
            parts.branches,
            parts.level,
            parts.caught_up,
        )

    def count(self, requests: int, sampled: bool, num_steps: int = 1) -> None:
        """Count steps; what was measured is forgotten by steps of its batch size."""
        self.steps[size_group(requests), sampled] += num_steps
        change = PACE_STEP * PACE_STEP * num_steps
        self.pace_variance = min(self.pace_variance + change, 1.0)

    def observe(self, work: Work, seconds: float, drafting: float = 0.0) -> None:
        """Learn from a measured step.

        Args:
            work: what it did.
            seconds: what it took.
            drafting: of these, from its plan to its drafts; 0: not known.

        """
        fit = self._fit(work)
        if fit is None:
            if work.rows or work.lookup or work.levels or work.caught_up:
                return
            key = size_group(work.requests), work.sampled
            fit = self.fits[key] = Fit.new(seconds / self.pace)
            fit.step = self.steps[key]
        terms = self._terms(work, fit)
        if drafting:
            ours = [a * b for a, b in zip(terms, DRAFTING, strict=True)]
            terms = [a - b for a, b in zip(terms, ours, strict=True)]
            if any(ours):
                self._correct(fit, ours, drafting)
            seconds -= drafting
        self._correct(fit, terms, seconds)

    def _correct(self, fit: Fit, terms: Sequence[float], seconds: float) -> None:
        """Move factors and pace towards a measured time."""
        pace = self.pace
        expected = pace * dot(terms, fit.factors)
        if expected <= 0.0:
            return
        direction = fit.times(terms)
        of_fit = pace * pace * dot(terms, direction)
        of_pace = expected * expected * self.pace_variance
        error = ERROR * expected
        variance = of_fit + of_pace + error * error
        most = MOST_ERRORS * math.sqrt(variance)
        off = min(seconds - expected, most)
        gain, share = pace * off / variance, pace * pace / variance
        least = LEAST_IF_TIMED if self.forwards.target else LEAST
        fit.correct(direction, gain, share, least)
        self.pace += pace * self.pace_variance * expected * off / variance
        self.pace_variance *= 1.0 - of_pace / variance

    def _known_fit(self, work: Work) -> Fit:
        """The factors for a step's batch size and kind.

        Raises:
            LookupError: nothing was timed yet.

        """
        fit = self._fit(work)
        if fit is None:
            raise LookupError("no step was timed yet")
        return fit

    def _fit(self, work: Work) -> Fit | None:
        """The same up to its last step; None: nothing was timed yet."""
        key = size_group(work.requests), work.sampled
        fit = self.fits.get(key)
        if fit is None:
            fit = self._prior(work)
            if fit is None:
                return None
            self.fits[key] = fit
            fit.step = self.steps[key]
        fit.forget(self.steps[key])
        return fit

    def _prior(self, work: Work) -> Fit | None:
        """What a batch size begins with: the nearest one, or timed forwards."""
        size = size_group(work.requests)
        sizes = {at for at, sampled in self.fits if sampled == work.sampled}
        other_kind = {at for at, sampled in self.fits if sampled != work.sampled}
        kind = work.sampled if sizes else not work.sampled
        nearest = nearest_size(sizes or other_kind, size)
        forward = self.forwards.forward(work.requests)
        if nearest is None:
            return None if forward is None else Fit.new(forward)
        near = self.fits[nearest, kind]
        there = self.forwards.forward(nearest)
        ratio = 1.0 if forward is None or there is None else forward / there
        return near.inherit(near.plain * near.factors[0] * ratio)

    def _terms(self, work: Work, fit: Fit) -> list[float]:
        """Seconds of a step's terms where every factor is 1."""
        plain, forwards = fit.plain, self.forwards
        rows = work.rows * UNTIMED_ROW / (work.requests + UNTIMED_ROWS) * plain
        extra = forwards.extra(work.requests, work.rows)
        if extra is not None:
            rows = extra + HOST_ROW * rows
        level = forwards.level(work.requests)
        token = forwards.draft_row()
        return [
            plain,
            rows,
            work.drafted * PRIOR.fixed * plain,
            work.branches * PRIOR.branches * plain,
            work.lookup * PRIOR.lookup * plain,
            work.levels * (PRIOR.level * plain if level is None else level),
            work.caught_up * (PRIOR.caught_up * plain if token is None else token),
        ]
