"""What drafts must promise to be worth their time, as measured.

Only additions, products, quotients and square roots: they give the same bits on any
processor, so that all ranks choose alike.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from vllm_treespec.schedule.batch_sizes import nearest_size
from vllm_treespec.schedule.forward_times import NOT_TIMED, ForwardTimes
from vllm_treespec.schedule.learned import MEMORY_STEPS, FadingMean, left_after

# What is guessed of a step's drafts before steps with any were measured, as parts of a
# plain step: what the first one costs besides; a level that a draft model reads; how
# many requests' rows a target reads in the time that one needs, then half of what that
# makes a row cost; a token that a draft model catches up on; and what trees cost
# besides that are no chains. Forwards that were timed at the start take the place of
# levels, rows and tokens.
GUESSED_FIRST = 0.08
GUESSED_LEVEL = 0.15
FREE_ROWS = 16
GUESSED_EACH = 0.5
GUESSED_CAUGHT_UP = 0.01
GUESSED_BRANCHES = 0.04
# Standard error of a measured time, as a part of a plain step. On a quiet machine it is
# less, which then costs a few steps; where it is more, few steps must not tell much.
ERROR = 0.15
# A measured time counts up to so many times what was expected.
LONGEST = 1.5
# The least that a draft costs, as a part of a plain step's time for a request.
LEAST_EACH = 0.001
# The same, as a part of a row's time when forwards were timed.
LEAST_OF_A_ROW = 0.5
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
    # of each request: accepted tokens that a model's first level is thought to add
    # where an index finds nothing, and ``kept`` of the model's promises; empty where no
    # index drafts beside a model
    added: Sequence[float] = ()
    model_kept: Sequence[float] = ()
    # levels that draft models read, where the host must not wait to see what they
    # drafted; None: all, or as many as what they drafted is worth
    num_levels: int | None = None
    # of all trees of a step together that are no chains, besides
    branches: float = 0.0

    def of_model(self) -> Prices:
        """The same for what a model drafts beside an index."""
        return replace(self, kept=self.model_kept)

    def least(self, min_probability: float | None) -> list[float]:
        """The probability that drafts of each request have at least.

        A draft is worth its row where its probability, times what is kept of such
        promises, is its price.
        """
        return [max(min_probability or 0.0, self.draft / kept) for kept in self.kept]

    def gain(self, num_drafts: int, has_branches: bool, num_accepted: float) -> float:
        """Accepted tokens of a step less what its drafts cost, levels left out.

        Args:
            num_drafts: of all its trees.
            has_branches: whether one of them is no chain.
            num_accepted: of its drafts, or what they promise and likely keep.

        """
        if not num_drafts:
            return 0.0
        besides = self.first + has_branches * self.branches
        return num_accepted - num_drafts * self.draft - besides


class DraftParts(NamedTuple):
    """The parts of what a step's drafts cost: how often each came, or its seconds."""

    # any drafts at all
    first: float
    # a level that draft models read
    level: float
    # a draft
    each: float
    # a token of earlier steps that draft models read, as they were behind
    caught_up: float
    # any trees that are no chains
    branches: float

    @classmethod
    def of_step(
        cls, num_levels: int, num_drafts: int, num_caught_up: int, has_branches: bool
    ) -> DraftParts:
        """How often each part came in a step."""
        return cls(num_drafts > 0, num_levels, num_drafts, num_caught_up, has_branches)

    def seconds(self, counts: DraftParts) -> float:
        """What they take together that came so often."""
        return sum(a * b for a, b in zip(self, counts, strict=True))


@dataclass
class DraftTimes:
    """How much longer than a plain step one with drafts takes, at one batch size.

    A sum of parts. It is fitted to measured steps by least squares. The guess counts as
    one more measurement of each part, with an error of its own (ridge regression).
    Older steps count less.

    Attributes:
        guess: seconds of the parts.
        doubt: errors of the guess, in seconds.
        error: of a measured step, in seconds.

    """

    guess: DraftParts
    doubt: DraftParts
    error: float
    step: int = 0
    # over the measured steps: products of how often each part came with how often the
    # others came, and in the last column with the seconds
    sums: list[list[float]] = field(
        default_factory=lambda: [
            [0.0] * (len(DraftParts._fields) + 1) for _ in DraftParts._fields
        ]
    )

    def add(self, step: int, counts: DraftParts, seconds: float) -> None:
        """Add a measured step that took so much longer than a plain one."""
        self._fade(step)
        for row, count in zip(self.sums, counts, strict=True):
            for column, other in enumerate((*counts, seconds)):
                row[column] += count * other

    def fit(self, step: int) -> DraftParts:
        """Seconds of the parts; none is below 0."""
        self._fade(step)
        rows = [list(row) for row in self.sums]
        for part, (guess, doubt) in enumerate(zip(self.guess, self.doubt, strict=True)):
            weight = (self.error / doubt) ** 2
            rows[part][part] += weight
            rows[part][-1] += weight * guess
        return DraftParts(*(max(seconds, 0.0) for seconds in solved(rows)))

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

    def __init__(self, forwards: ForwardTimes = NOT_TIMED) -> None:
        """Begin with no steps, and with forwards that the start has timed."""
        self.forwards = forwards
        self.times: dict[int, DraftTimes] = {}

    def add(
        self,
        step: int,
        batch_size: int,
        counts: DraftParts,
        seconds: float,
        plain: float,
        models: float = 0.0,
    ) -> None:
        """Add a step with drafts.

        Args:
            step: its number.
            batch_size: of the step.
            counts: how often each part came.
            seconds: what it took.
            plain: seconds of a plain one.
            models: seconds in which models drafted, which tell levels from the other
                parts; 0: not known.

        """
        times = self._times(step, batch_size, plain)
        parts = times.fit(step)
        if models:
            of_models = DraftParts(0, counts.level, 0, counts.caught_up, 0)
            most = parts.seconds(of_models) + (LONGEST - 1) * plain
            times.add(step, of_models, min(models, most))
            counts, seconds = counts._replace(level=0, caught_up=0), seconds - models
        expected = plain + parts.seconds(counts)
        times.add(step, counts, min(seconds, LONGEST * expected) - plain)

    def prices(
        self, step: int, batch_size: int, plain: float, kept: Sequence[float]
    ) -> Prices:
        """What drafts must promise where plain steps take so many seconds."""
        parts = self._times(step, batch_size, plain).fit(step)
        tokens_a_second = batch_size / plain
        row = self.forwards.target_row(batch_size) or 0.0
        least = max(LEAST_OF_A_ROW * row, LEAST_EACH * plain / batch_size)
        each = max(parts.each, least)
        return Prices(
            draft=each * tokens_a_second,
            first=parts.first * tokens_a_second,
            kept=kept,
            level=parts.level * tokens_a_second,
            branches=parts.branches * tokens_a_second,
        )

    def caught_up_seconds(self, step: int, batch_size: int, plain: float) -> float:
        """What a token of earlier steps takes that draft models read."""
        return self._times(step, batch_size, plain).fit(step).caught_up

    def recall(self, batch_size: int, plain: float, parts: DraftParts) -> None:
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
            parts = timed_parts(self.forwards, batch_size, plain)
            if nearest is not None:
                there = self.times[nearest]
                known = there.fit(there.step)
                parts = known._replace(each=max(known.each, parts.each))
            self.recall(batch_size, plain, parts)
        return self.times[batch_size]


def guessed_parts(batch_size: int, plain: float) -> DraftParts:
    """Seconds of the parts before anything was measured."""
    return DraftParts(
        first=GUESSED_FIRST * plain,
        level=GUESSED_LEVEL * plain,
        each=GUESSED_EACH / (batch_size + FREE_ROWS) * plain,
        caught_up=GUESSED_CAUGHT_UP * plain,
        branches=GUESSED_BRANCHES * plain,
    )


def timed_parts(forwards: ForwardTimes, batch_size: int, plain: float) -> DraftParts:
    """The same, by the forwards that the start has timed."""
    found = {
        "level": forwards.level(batch_size),
        "each": forwards.target_row(batch_size),
        "caught_up": forwards.draft_row(),
    }
    known = {part: seconds for part, seconds in found.items() if seconds is not None}
    return guessed_parts(batch_size, plain)._replace(**known)


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

    def observe_all(
        self,
        step: int,
        sampled: Mapping[int, bool],
        slots: Sequence[int],
        promised: Sequence[float],
        num_accepted: Sequence[int],
    ) -> None:
        """Learn from the trees of a step.

        Args:
            step: its number.
            sampled: whether requests are sampled, by slot. Others tell nothing.
            slots: of the trees.
            promised: tokens; 0: none, and the tree tells nothing.
            num_accepted: accepted tokens.

        """
        for slot, tokens, accepted in zip(slots, promised, num_accepted, strict=True):
            if tokens and slot in sampled:
                self.observe(step, slot, sampled[slot], tokens, accepted)

    def kept_by(
        self, step: int, sampled: Mapping[int, bool], slots: Sequence[int]
    ) -> list[float]:
        """What is kept of promises to each request."""
        return [self.kept(step, slot, sampled[slot]) for slot in slots]

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
