"""How many claimed tokens are accepted, and how deep trees survive.

Only additions, products and quotients: they give the same bits on any processor, so
that all ranks compute alike.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from vllm_treespec.schedule.decay import DecayedMean
from vllm_treespec.schedule.plan import StepResult
from vllm_treespec.schedule.ratios import Ratios
from vllm_treespec.trees.source import Source

# How often a level is accepted below an accepted one before any was read.
PRIOR_SURVIVAL = 0.6


class Calibration:
    """Accepted over claimed tokens by source, and survival by depth.

    Greedy and sampled requests are apart. A request's ratio begins with its text's.
    """

    def __init__(self) -> None:
        """Begin with nothing measured."""
        # accepted over claimed tokens
        self.ratios = Ratios()
        # sampled -> of each level from the first, the share of trees accepted to it
        self.levels: dict[bool, list[DecayedMean]] = {False: [], True: []}

    def kept(self, step: int, source: Source, slot: int, sampled: bool) -> float:
        """Accepted over claimed tokens of a request's next tree."""
        ratio = self.ratios.of_text(step, source, sampled)
        request = self.ratios.request(source, slot)
        return ratio if request is None else request.mean(step, ratio)

    def observe(self, step: int, kinds: Mapping[int, bool], result: StepResult) -> None:
        """Learn what was accepted of the claims of a step's trees.

        Args:
            step: its number.
            kinds: whether requests are sampled, by slot. Others tell nothing.
            result: what the step brought.

        """
        for source, claims in result.claimed.items():
            both = zip(result.slots, claims, result.accepted[source], strict=True)
            for slot, claimed, accepted in both:
                if claimed and slot in kinds:
                    tokens = claimed, accepted
                    self.ratios.add_to_request(step, source, slot, *tokens)
                    self.ratios.add_to_text(step, source, kinds[slot], *tokens)

    def observe_levels(
        self, step: int, sampled: bool, num_levels: int, num_accepted: int
    ) -> None:
        """Learn how deep a tree was accepted of which a model read so many levels."""
        levels = self.levels[sampled]
        levels += [DecayedMean() for _ in range(num_levels - len(levels))]
        for level, share in enumerate(levels[:num_levels], start=1):
            share.add(step, 1.0, float(num_accepted >= level))

    def survival(self, step: int, sampled: bool, depth: int) -> list[float]:
        """How often trees are accepted down to each of so many levels.

        A level that was hardly read survives, below the one above it, as often as that
        one does below its own.
        """
        levels = self.levels[sampled]
        above, rate = 1.0, PRIOR_SURVIVAL
        found = []
        for level in range(depth):
            share = levels[level] if level < len(levels) else DecayedMean()
            mean = min(share.mean(step, above * rate), 1.0)
            found.append(mean)
            rate = mean / above if above else 0.0
            above = mean
        return found

    def forget(self, slots: Sequence[int]) -> None:
        """Forget requests that ended; their slots will be other requests'."""
        self.ratios.forget(slots)
