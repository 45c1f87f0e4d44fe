"""Whether to ask an index in a step: that takes time, also where it finds nothing."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from statistics import median

from vllm_treespec.schedule.learned import MEMORY_STEPS, FadingMean

# Tokens a request that an index is thought to bring in a step, and steps that this
# guess counts for.
GUESSED_GAIN, GUESSED_STEPS = 0.1, 8.0
# Steps after which a third of what was gained still counts: a text may begin to repeat,
# or end to. The middle one of these means decides.
MEMORIES = (16, 64, MEMORY_STEPS)
# Steps that count for nothing gained, or no time taken.
NOTHING_STEPS = 1.0
# Steps that count for no other work than the index's own.
EXTRA_STEPS = 64.0
# An index that rests is asked in one of so many rounds.
REST_ROUNDS = 4


@dataclass
class Asked:
    """What steps brought, and took, in which an index was asked."""

    # accepted tokens of a step less what its drafts cost, by memory
    gains: list[FadingMean] = field(
        default_factory=lambda: [FadingMean(memory) for memory in MEMORIES]
    )
    # from the choice of the index to its drafts
    seconds: FadingMean = field(default_factory=FadingMean)
    # how much longer than a plain step one took in which nothing was found
    extra: FadingMean = field(default_factory=FadingMean)


class Asking:
    """Weighs what asking an index brings against the time that it takes."""

    def __init__(self, steps_at: Counter[int]) -> None:
        """Begin with nothing measured; the schedule counts steps by batch size."""
        self.steps_at = steps_at
        # by batch size
        self.asked: dict[int, Asked] = {}

    def gained(self, batch_size: int, tokens: float) -> None:
        """Add what a step brought, less what its drafts cost."""
        asked = self.asked.setdefault(batch_size, Asked())
        for gain in asked.gains:
            gain.add(self.steps_at[batch_size], 1.0, tokens)

    def took(self, batch_size: int, seconds: float) -> None:
        """Add how long it took to ask in a step."""
        asked = self.asked.setdefault(batch_size, Asked())
        asked.seconds.add(self.steps_at[batch_size], 1.0, seconds)

    def found_nothing(self, batch_size: int, extra_seconds: float) -> None:
        """Add how much longer than a plain step one took without drafts."""
        asked = self.asked.setdefault(batch_size, Asked())
        asked.extra.add(self.steps_at[batch_size], 1.0, extra_seconds)

    def seconds(self, batch_size: int) -> float:
        """What asking in a step takes: at least the time that the index needs."""
        asked, step = self.asked.get(batch_size), self.steps_at[batch_size]
        if asked is None:
            return 0.0
        drafting = asked.seconds.mean(step, 0.0, NOTHING_STEPS)
        return max(drafting, asked.extra.mean(step, drafting, EXTRA_STEPS))

    def pays(self, batch_size: int, plain_seconds: float) -> bool:
        """Whether asking brings more tokens than plain steps emit in that time."""
        asked, step = self.asked.get(batch_size), self.steps_at[batch_size]
        if asked is None:
            return True
        guess = GUESSED_GAIN * batch_size
        late, *longer = asked.gains
        gain = median(
            [
                late.mean(step, 0.0, NOTHING_STEPS),
                *(mean.mean(step, guess, GUESSED_STEPS) for mean in longer),
            ]
        )
        return gain * plain_seconds > self.seconds(batch_size) * batch_size
