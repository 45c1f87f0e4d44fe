"""Accepted over expected tokens, of texts and of requests.

Only additions, products and quotients: they give the same bits on any processor, so
that all ranks compute alike.
"""

from __future__ import annotations

from collections.abc import Iterable

from vllm_treespec.schedule.decay import DecayedMean
from vllm_treespec.trees.source import Source


class Ratios:
    """Ratios by sources: of a text, greedy and sampled apart, and of each request.

    A text's ratio begins with 1.
    """

    def __init__(self) -> None:
        """Begin with nothing measured."""
        # sources, sampled -> of all requests
        self.texts: dict[tuple[Source, bool], DecayedMean] = {}
        # sources, slot -> of a request
        self.requests: dict[tuple[Source, int], DecayedMean] = {}

    def of_text(self, step: int, sources: Source, sampled: bool) -> float:
        """The ratio of a request that is like most."""
        text = self.texts.get((sources, sampled))
        return 1.0 if text is None else text.mean(step, 1.0)

    def request(self, sources: Source, slot: int) -> DecayedMean | None:
        """What is known of a request; None: nothing."""
        return self.requests.get((sources, slot))

    def add_to_request(
        self, step: int, sources: Source, slot: int, expected: float, accepted: float
    ) -> None:
        """Add tokens of a request."""
        request = self.requests.setdefault((sources, slot), DecayedMean())
        request.add(step, expected, accepted)

    def add_to_text(
        self,
        step: int,
        sources: Source,
        sampled: bool,
        expected: float,
        accepted: float,
    ) -> None:
        """Add tokens of a text."""
        text = self.texts.setdefault((sources, sampled), DecayedMean())
        text.add(step, expected, accepted)

    def forget(self, slots: Iterable[int]) -> None:
        """Forget requests that ended; their slots will be other requests'."""
        ended = set(slots)
        for key in [key for key in self.requests if key[1] in ended]:
            del self.requests[key]
