"""What a suffix index found, and how likely each token comes next."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby

from vllm_treespec.trees.draft import NO_TOKEN

# Doubt that a text goes on as it did before is this much less for each token that
# matches. Measured on chat (docs/dev/sources.md).
DOUBT = 0.8
# However many tokens match, a text goes on as before with this probability at most: to
# copy ends somewhere.
MOST_SURE = 0.95

# Length of an earlier occurrence of the last tokens, and the tokens that followed it.
Continuation = tuple[int, list[int]]


@dataclass(frozen=True)
class Continuations:
    """What a suffix index found for the requests that draft."""

    # per request, longest occurrences first
    by_request: list[list[Continuation]]

    @cached_property
    def likeliest(self) -> list[tuple[float, int]]:
        """Of each request the likeliest next token: its probability, and the token.

        The token is NO_TOKEN where nothing was found.
        """
        return [likeliest_token(found) for found in self.by_request]


def likeliest_token(continuations: Sequence[Continuation]) -> tuple[float, int]:
    """Probability of the likeliest next token, and the token; NO_TOKEN without one."""
    shares = next_tokens(continuations, 0)
    likely = ((share, token) for token, (share, _) in shares.items())
    return max(likely, default=(0.0, NO_TOKEN))


def probability_alone(length: int) -> float:
    """How likely a text goes on as after its only match, of so many tokens."""
    return MOST_SURE * (1 - DOUBT**length)


def next_tokens(
    continuations: Sequence[Continuation], depth: int
) -> dict[int, tuple[float, list[Continuation]]]:
    """Which tokens come next, and how likely: shorter matches share what is left.

    Occurrences of equal length share evenly what a single one of that length has.

    Args:
        continuations: that agree in their first ``depth`` tokens, longest matches
            first.
        depth: tokens that were followed.

    Returns:
        by token: its probability, and the continuations that go on with it.

    """
    found: dict[int, tuple[float, list[Continuation]]] = {}
    left = 1.0
    longer = [pair for pair in continuations if len(pair[1]) > depth]
    for length, group in groupby(longer, key=lambda pair: pair[0]):
        same = list(group)
        together = left * probability_alone(length + depth)
        left -= together
        for pair in same:
            share, agreeing = found.setdefault(pair[1][depth], (0.0, []))
            agreeing.append(pair)
            found[pair[1][depth]] = share + together / len(same), agreeing
    return found
