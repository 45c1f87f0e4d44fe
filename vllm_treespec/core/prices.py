"""What drafts must promise to be worth their time, as measured.

Only additions, products, quotients and square roots: they give the same bits on any
processor, so that all ranks choose alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from vllm_treespec.core.learned import MEMORY_STEPS, FadingMean, left_after

# What is guessed of a step's drafts before steps with any were measured, as parts of a
# plain step: what the first one costs besides, and how many requests' rows a target
# reads in the time that one needs; then half of what that makes a row cost.
GUESSED_FIRST = 0.08
FREE_ROWS = 16
GUESSED_EACH = 0.5
# Standard error of a measured time, as a part of a plain step.
ERROR = 0.06
# A measured time counts up to so many times what was expected.
LONGEST = 1.5
# The least that a draft costs, as a part of a plain step's time for a request.
LEAST_EACH = 0.001
# Promised tokens that a guess counts for: of the text, and of a request.
GUESSED_PROMISES = 6.0
GUESSED_REQUEST_PROMISES = 4.0
REQUEST_MEMORY_STEPS = 128


@dataclass(frozen=True)
class Prices:
    """Accepted tokens that a step's drafts must promise."""

    # of each draft
    draft: float
    # of all drafts of a step together, besides
    first: float
    # of each request that drafts, in their order: accepted tokens over promised ones
    kept: Sequence[float]


@dataclass
class DraftTimes:
    """How much longer than a plain step one with drafts takes, at one batch size.

    A line over the number of drafts, fitted to measured steps by least squares. The
    guess counts as one more measurement of each of its two parts, with an error as
    large as the part (ridge regression). Older steps count less.

    Attributes:
        first: seconds that any drafts cost, guessed.
        each: seconds that each draft costs besides, guessed.
        error: of a measured step, in seconds.

    """

    first: float
    each: float
    error: float
    step: int = 0
    # over the measured steps: 1, drafts, drafts², seconds, drafts x seconds
    sums: list[float] = field(default_factory=lambda: [0.0] * 5)

    def add(self, step: int, num_drafts: int, seconds: float) -> None:
        """Add a measured step that took so much longer than a plain one."""
        self._fade(step)
        parts = (1.0, num_drafts, num_drafts**2, seconds, num_drafts * seconds)
        self.sums = [old + new for old, new in zip(self.sums, parts, strict=True)]

    def fit(self, step: int) -> tuple[float, float]:
        """Seconds of any drafts, and of each draft besides; neither is below 0."""
        self._fade(step)
        count, drafts, squares, seconds, products = self.sums
        weight_first = (self.error / self.first) ** 2
        weight_each = (self.error / self.each) ** 2
        count += weight_first
        seconds += weight_first * self.first
        squares += weight_each
        products += weight_each * self.each
        size = count * squares - drafts * drafts
        first = (seconds * squares - drafts * products) / size
        each = (count * products - drafts * seconds) / size
        return max(first, 0.0), max(each, 0.0)

    def _fade(self, step: int) -> None:
        """Let the past fade up to a step."""
        left = left_after(step - self.step, MEMORY_STEPS)
        self.sums = [total * left for total in self.sums]
        self.step = step


class DraftCosts:
    """What steps with drafts cost more than plain ones, by batch size."""

    def __init__(self) -> None:
        """Begin with nothing measured."""
        self.times: dict[int, DraftTimes] = {}

    def add(
        self, step: int, batch_size: int, num_drafts: int, seconds: float, plain: float
    ) -> None:
        """Add a step with drafts, and the seconds of a plain one."""
        times = self._times(batch_size, plain)
        first, each = times.fit(step)
        most = LONGEST * (plain + first + each * num_drafts)
        times.add(step, num_drafts, min(seconds, most) - plain)

    def prices(
        self, step: int, batch_size: int, plain: float, kept: Sequence[float]
    ) -> Prices:
        """What drafts must promise where plain steps take so many seconds."""
        first, each = self._times(batch_size, plain).fit(step)
        tokens_a_second = batch_size / plain
        each = max(each, LEAST_EACH * plain / batch_size)
        return Prices(each * tokens_a_second, first * tokens_a_second, kept)

    def _times(self, batch_size: int, plain: float) -> DraftTimes:
        """Times at a batch size; in the beginning those of a guess."""
        if batch_size not in self.times:
            self.times[batch_size] = DraftTimes(
                first=GUESSED_FIRST * plain,
                each=GUESSED_EACH * plain / (batch_size + FREE_ROWS),
                error=ERROR * plain,
            )
        return self.times[batch_size]


class Promises:
    """How many of the accepted tokens that trees promise they keep."""

    def __init__(self) -> None:
        """Begin with nothing measured."""
        # sampled -> accepted tokens over promised ones
        self.text = {False: FadingMean(), True: FadingMean()}
        # slot -> accepted tokens over those that most requests would have had
        self.requests: dict[int, FadingMean] = {}

    def observe(
        self, step: int, slot: int, sampled: bool, promised: float, accepted: int
    ) -> None:
        """Learn what was accepted of a tree that promised so many tokens."""
        expected = promised * self._of_text(step, sampled)
        request = self.requests.setdefault(slot, FadingMean(REQUEST_MEMORY_STEPS))
        request.add(step, expected, accepted)
        self.text[sampled].add(step, promised, accepted)

    def kept(self, step: int, slot: int, sampled: bool) -> float:
        """Accepted tokens over promised ones that a request's next tree may have."""
        of_text = self._of_text(step, sampled)
        request = self.requests.get(slot)
        if request is None:
            return of_text
        return of_text * request.mean(step, 1.0, GUESSED_REQUEST_PROMISES)

    def forget(self, slots: Sequence[int]) -> None:
        """Forget requests that ended; their slots will be other requests'."""
        for slot in slots:
            self.requests.pop(slot, None)

    def _of_text(self, step: int, sampled: bool) -> float:
        return self.text[sampled].mean(step, 1.0, GUESSED_PROMISES)
