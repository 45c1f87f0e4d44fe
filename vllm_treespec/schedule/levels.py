"""How many levels draft models read, where that is decided before they read.

On a GPU the host must not wait for what a model drafted. So past steps decide: how
often a tree was accepted down to each level.

Only additions, products and quotients: they give the same bits on any processor, so
that all ranks choose alike.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from vllm_treespec.schedule.base import StepOutcome
from vllm_treespec.schedule.learned import FadingMean
from vllm_treespec.schedule.prices import Prices

# How often a level is accepted where the one above was, before any was read; and the
# trees that a guess counts for.
GUESSED_RATE, GUESSED_TREES = 0.6, 4.0


class AcceptedLevels:
    """How often trees are accepted down to a level, greedy and sampled requests apart.

    Only trees of which the level was read tell of it. A level that is not read any more
    is forgotten. It is read again when the levels above it are accepted more often.
    """

    def __init__(self) -> None:
        """Begin with nothing measured."""
        # sampled -> of each level from the first, the share of trees accepted to it
        self.shares: dict[bool, list[FadingMean]] = {False: [], True: []}

    def observe_all(
        self,
        step: int,
        sampled: Mapping[int, bool],
        outcome: StepOutcome,
        num_drafts: int,
    ) -> None:
        """Learn how deep what a model drafted was accepted, beside an index if any.

        Args:
            step: its number.
            sampled: whether requests are sampled, by slot. Others tell nothing.
            outcome: what the step brought.
            num_drafts: draft tokens of a whole tree; cut trees tell nothing.

        """
        if not outcome.num_levels:
            return
        num_found = outcome.num_found or [0] * len(outcome.slots)
        for slot, accepted, found, limit in zip(
            outcome.slots,
            outcome.num_accepted,
            num_found,
            outcome.limits,
            strict=True,
        ):
            if slot in sampled and limit >= num_drafts:
                num_added = accepted - found
                self.observe(step, sampled[slot], outcome.num_levels, num_added)

    def observe(
        self, step: int, sampled: bool, num_levels: int, num_accepted: int
    ) -> None:
        """Learn from a tree of which a model read so many levels."""
        shares = self.shares[sampled]
        shares += [FadingMean() for _ in range(num_levels - len(shares))]
        for level, share in enumerate(shares[:num_levels], start=1):
            share.add(step, 1.0, float(num_accepted >= level))

    def expected(self, step: int, sampled: bool, num_levels: int) -> list[float]:
        """How often each of so many levels is accepted, as far as is known.

        A level that was hardly read is thought as likely, below the one above it, as
        that one was below its own.
        """
        shares = self.shares[sampled]
        above, rate = 1.0, GUESSED_RATE
        expected = []
        for level in range(num_levels):
            share = shares[level] if level < len(shares) else FadingMean()
            mean = min(share.mean(step, above * rate, GUESSED_TREES), 1.0)
            expected.append(mean)
            rate = mean / above if above else 0.0
            above = mean
        return expected

    def worth_reading(
        self,
        step: int,
        sampled: Sequence[bool],
        factors: Sequence[float],
        prices: Prices,
        num_levels: int,
    ) -> int:
        """Levels down to the first that is not worth its forward; at least one.

        Args:
            step: now.
            sampled: of each request that drafts.
            factors: how much more is accepted of its trees than of others'.
            prices: what a level and a draft cost.
            num_levels: of the largest tree.

        """
        expected = {
            kind: self.expected(step, kind, num_levels) for kind in set(sampled)
        }
        for level in range(1, num_levels):
            gains = [
                max(min(expected[kind][level] * factor, 1.0) - prices.draft, 0.0)
                for kind, factor in zip(sampled, factors, strict=True)
            ]
            if sum(gains) <= prices.level:
                return level
        return num_levels
