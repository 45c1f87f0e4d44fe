"""Sums and means whose older parts count less.

Only additions, products, quotients and square roots: they give the same bits on any
processor, so that all ranks compute alike.
"""

from __future__ import annotations

from dataclasses import dataclass

# Steps after which a third of a mean is left: long enough for 3 % of error, short
# enough to follow a text that changes.
MEMORY_STEPS = 192
# Trees, or tokens, that a prior counts for: few trees tell nothing yet.
PRIOR_WEIGHT = 4.0


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
class DecayedMean:
    """A weighted mean whose older parts count less.

    Attributes:
        memory: steps after which about a third is left of a part.
        weight: of all that was added.
        total: sum of what was added, by weight.
        step: up to which both have decayed.

    """

    memory: int = MEMORY_STEPS
    weight: float = 0.0
    total: float = 0.0
    step: int = 0

    def decay(self, step: int) -> None:
        """Bring both sums to a step."""
        if step != self.step:
            left = left_after(step - self.step, self.memory)
            self.weight *= left
            self.total *= left
            self.step = step

    def add(self, step: int, weight: float, total: float) -> None:
        """Add a part."""
        self.decay(step)
        self.weight += weight
        self.total += total

    def mean(
        self, step: int, prior: float, prior_weight: float = PRIOR_WEIGHT
    ) -> float:
        """The mean at a step, with a prior that counts as so much weight."""
        self.decay(step)
        return (self.total + prior * prior_weight) / (self.weight + prior_weight)
