"""What drafts must promise to be worth their time, as measured.

Only additions, products, quotients and square roots: they give the same bits on any
processor, so that all ranks choose alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from vllm_treespec.core.batch_sizes import nearest_size
from vllm_treespec.core.learned import MEMORY_STEPS, FadingMean, left_after

# What is guessed of a step's drafts before steps with any were measured, as parts of a
# plain step: what the first one costs besides; a level that a draft model reads; and
# how many requests' rows a target reads in the time that one needs, then half of what
# that makes a row cost.
GUESSED_FIRST = 0.08
GUESSED_LEVEL = 0.15
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
    # of all drafts below another level that draft models read
    level: float = 0.0


@dataclass
class DraftTimes:
    """How much longer than a plain step one with drafts takes, at one batch size.

    A sum of three parts: what any drafts cost, each level that draft models read, and
    each draft. It is fitted to measured steps by least squares. The guess counts as one
    more measurement of each part, with an error of its own (ridge regression). Older
    steps count less.

    Attributes:
        guess: seconds of the three parts.
        doubt: errors of the guess, in seconds.
        error: of a measured step, in seconds.

    """

    guess: Sequence[float]
    doubt: Sequence[float]
    error: float
    step: int = 0
    # over the measured steps: products of how often each part came with how often the
    # others came, and in the last column with the seconds
    sums: list[list[float]] = field(
        default_factory=lambda: [[0.0] * 4 for _ in range(3)]
    )

    def add(self, step: int, num_levels: int, num_drafts: int, seconds: float) -> None:
        """Add a measured step that took so much longer than a plain one."""
        self._fade(step)
        counts = (float(num_drafts > 0), float(num_levels), float(num_drafts))
        for row, count in zip(self.sums, counts, strict=True):
            for column, other in enumerate((*counts, seconds)):
                row[column] += count * other

    def fit(self, step: int) -> tuple[float, float, float]:
        """Seconds of the three parts; none is below 0."""
        self._fade(step)
        rows = [list(row) for row in self.sums]
        for part, (guess, doubt) in enumerate(zip(self.guess, self.doubt, strict=True)):
            weight = (self.error / doubt) ** 2
            rows[part][part] += weight
            rows[part][-1] += weight * guess
        first, level, each = (max(seconds, 0.0) for seconds in solved(rows))
        return first, level, each

    def _fade(self, step: int) -> None:
        """Let the past fade up to a step."""
        left = left_after(step - self.step, MEMORY_STEPS)
        self.sums = [[total * left for total in row] for row in self.sums]
        self.step = step


def solved(rows: list[list[float]]) -> list[float]:
    """Solve linear equations of a positive definite matrix, by elimination.

    Args:
        rows: of the matrix, each with its right side at the end. They are changed.

    """
    for pivot, row in enumerate(rows):
        for other in rows[pivot + 1 :]:
            factor = other[pivot] / row[pivot]
            other[:] = [b - factor * a for a, b in zip(row, other, strict=True)]
    found: list[float] = []
    for row in reversed(rows):
        *factors, right = row[len(rows) - len(found) - 1 :]
        known = sum(a * b for a, b in zip(factors[1:], found, strict=True))
        found.insert(0, (right - known) / factors[0])
    return found


class DraftCosts:
    """What steps with drafts cost more than plain ones, by batch size."""

    def __init__(self) -> None:
        """Begin with nothing measured."""
        self.times: dict[int, DraftTimes] = {}

    def add(
        self,
        step: int,
        batch_size: int,
        num_levels: int,
        num_drafts: int,
        seconds: float,
        plain: float,
    ) -> None:
        """Add a step with drafts, and the seconds of a plain one."""
        times = self._times(step, batch_size, plain)
        first, level, each = times.fit(step)
        expected = plain + first + level * num_levels + each * num_drafts
        seconds = min(seconds, LONGEST * expected) - plain
        times.add(step, num_levels, num_drafts, seconds)

    def prices(
        self, step: int, batch_size: int, plain: float, kept: Sequence[float]
    ) -> Prices:
        """What drafts must promise where plain steps take so many seconds."""
        first, level, each = self._times(step, batch_size, plain).fit(step)
        tokens_a_second = batch_size / plain
        each = max(each, LEAST_EACH * plain / batch_size)
        return Prices(
            draft=each * tokens_a_second,
            first=first * tokens_a_second,
            kept=kept,
            level=level * tokens_a_second,
        )

    def recall(self, batch_size: int, plain: float, parts: Sequence[float]) -> None:
        """Begin with the costs that an earlier start knew, in seconds."""
        self.times[batch_size] = DraftTimes(
            parts, guessed_parts(batch_size, plain), ERROR * plain
        )

    def _times(self, step: int, batch_size: int, plain: float) -> DraftTimes:
        """Times at a batch size.

        In the beginning drafts are thought to take as long as at the nearest batch
        size, and a row at least what is guessed.
        """
        if batch_size not in self.times:
            nearest = nearest_size(self.times, batch_size)
            parts = guessed_parts(batch_size, plain)
            if nearest is not None:
                first, level, each = self.times[nearest].fit(step)
                parts = [first, level, max(each, parts[-1])]
            self.recall(batch_size, plain, parts)
        return self.times[batch_size]


def guessed_parts(batch_size: int, plain: float) -> list[float]:
    """Seconds of the three parts before anything was measured."""
    each = GUESSED_EACH / (batch_size + FREE_ROWS)
    return [part * plain for part in (GUESSED_FIRST, GUESSED_LEVEL, each)]


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
