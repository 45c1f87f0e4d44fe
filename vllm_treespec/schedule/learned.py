"""What a measured schedule learned: means and times that fade.

Only additions, products, quotients and square roots: they give the same bits on any
processor, so that all ranks choose alike.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from statistics import median

# Steps after which about a third of what was learned still counts.
MEMORY_STEPS = 256
REQUEST_MEMORY_STEPS = 128
# Weight of a mean at most.
MOST_WEIGHT = 256.0
# Measured times that count, the latest ones; from more than a few the longest does not.
KEPT_TIMES = 12
FEW_TIMES = 3
# Times count up to so many medians.
LONGEST = 1.5
# How much shorter than measured a step may be for all we know: after one measured time,
# and at most.
DOUBT, MOST_DOUBT = 0.05, 0.2
# Times of which less is left are forgotten.
LEAST_WEIGHT = 0.1
# How much requests differ, as the standard deviation of their factors: what is guessed,
# requests that the guess counts for, and the least.
GUESSED_SPREAD, GUESSED_REQUESTS, LEAST_SPREAD = 0.55, 3.0, 0.15
SPREAD_MEMORY_STEPS = 2048
# Tokens that a request is expected to have accepted before it tells half of how much
# requests differ.
TELLING_TOKENS = 6.0
# Standard deviations by which more may be accepted of a new request's trees than of
# others', for all we know, and trees after which only half this hope is left.
HOPE_FOR_NEW = 0.55
HOPEFUL_TREES = 2.0


def left_after(steps: int, memory: int) -> float:
    """The share that is left after some steps: a power, by squaring."""
    left, factor = 1.0, 1.0 - 1.0 / memory
    while steps > 0:
        if steps & 1:
            left *= factor
        factor *= factor
        steps >>= 1
    return left


@dataclass
class FadingMean:
    """A mean whose older parts count less and less.

    Attributes:
        memory: steps after which about a third is left of a part.
        weight: of all that was added.
        total: sum of what was added, by weight.
        step: up to which both have faded.

    """

    memory: int = MEMORY_STEPS
    weight: float = 0.0
    total: float = 0.0
    step: int = 0

    def fade(self, step: int) -> None:
        """Let the past fade up to a step."""
        left = left_after(step - self.step, self.memory)
        self.weight *= left
        self.total *= left
        self.step = step

    def add(self, step: int, weight: float, total: float) -> None:
        """Let the past fade, and add."""
        self.fade(step)
        self.weight += weight
        self.total += total
        if self.weight > MOST_WEIGHT:
            self.total *= MOST_WEIGHT / self.weight
            self.weight = MOST_WEIGHT

    def mean(self, step: int, guess: float, guess_weight: float) -> float:
        """The mean at a step, with a guess that counts where little was added."""
        self.fade(step)
        return (self.total + guess * guess_weight) / (self.weight + guess_weight)


@dataclass
class RequestHistory:
    """How much more is accepted of a request's trees than of others'."""

    factor: FadingMean = field(default_factory=lambda: FadingMean(REQUEST_MEMORY_STEPS))
    num_trees: int = 0
    # over all its trees: accepted tokens, those of most requests, and their variance
    # where a request is like most
    accepted: float = 0.0
    usual: float = 0.0
    variance: float = 0.0

    def add(self, step: int, usual: float, accepted: float) -> None:
        """Add a tree: the tokens that most requests accept of it, and this one.

        Their number is taken as geometric.
        """
        self.factor.add(step, usual, accepted)
        self.num_trees += 1
        self.accepted += accepted
        self.usual += usual
        self.variance += usual * (1 + usual)

    def expected(self, step: int, spread: float) -> float:
        """The factor that the request has, as far as is known.

        The less requests differ, the more of what one of them shows is chance.

        Args:
            step: now.
            spread: how much requests differ.

        """
        if not self.usual:
            return 1.0
        chance = self.variance / self.usual
        return self.factor.mean(step, 1.0, chance / (spread * spread))

    def hopeful(self, step: int, spread: float) -> float:
        """A factor that the request may have, higher while few trees were seen."""
        hope = HOPE_FOR_NEW * HOPEFUL_TREES / (HOPEFUL_TREES + self.num_trees)
        return self.expected(step, spread) + hope * spread


class Spread:
    """How much more is accepted of some requests' trees than of others'."""

    def __init__(self) -> None:
        """Begin with nothing measured."""
        self.squares = FadingMean(SPREAD_MEMORY_STEPS)

    def add(self, step: int, history: RequestHistory) -> None:
        """Learn from a request that ended: how far it was off, less what is chance."""
        far = history.accepted - history.usual
        all_tokens = history.usual + TELLING_TOKENS
        scale = 1 / (all_tokens * all_tokens)
        weight = history.usual * history.usual * scale
        self.squares.add(step, weight, (far * far - history.variance) * scale)

    def value(self, step: int) -> float:
        """The standard deviation of requests' factors."""
        guess = GUESSED_SPREAD * GUESSED_SPREAD
        square = self.squares.mean(step, guess, GUESSED_REQUESTS)
        return math.sqrt(max(square, LEAST_SPREAD * LEAST_SPREAD))


@dataclass
class StepTimes:
    """Times of steps with one tree, or plain, at one batch size."""

    latest: deque[float] = field(default_factory=lambda: deque(maxlen=KEPT_TIMES))
    # mean of the latest ones, without what disturbed them
    seconds: float = 0.0
    count: FadingMean = field(default_factory=FadingMean)
    # step of the latest one
    timed_at: int = 0

    def add(self, step: int, seconds: float, num_steps: int = 1) -> None:
        """Add the time of a step, or of each of some steps."""
        if not self.is_known(step):
            self.latest.clear()
        self.latest.append(seconds)
        steady = sorted(self.latest)
        if len(steady) > FEW_TIMES:
            steady.pop()
        most = LONGEST * median(steady)
        self.seconds = sum(min(time, most) for time in steady) / len(steady)
        self.count.add(step, num_steps, 0.0)
        self.timed_at = step

    def is_known(self, step: int) -> bool:
        """Whether times are left that are not too old."""
        self.count.fade(step)
        return self.count.weight > LEAST_WEIGHT

    def hopeful(self, step: int) -> float:
        """A time that the step may have by now, shorter the older the times are."""
        self.count.fade(step)
        doubt = DOUBT / math.sqrt(self.count.weight) if self.count.weight else 1.0
        return self.seconds * (1 - min(doubt, MOST_DOUBT))
