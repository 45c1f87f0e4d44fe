"""What options of a measured schedule promise, and for how many requests."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from vllm_treespec.schedule.options import Option

# Requests for which a draft model is asked that was not timed at this batch size, and
# must read their prompts first.
FIRST_TRIED = 1


class Gain(NamedTuple):
    """What a request's tree may bring."""

    # hoped-for accepted tokens
    tokens: float
    slot: int
    # of a whole tree
    share: float
    # that draft models take for the request's tokens that they are behind, as a part of
    # each step that it will go on
    seconds: float
    # accepted tokens that are likely
    likely: float


class Offer(NamedTuple):
    """What an option promises."""

    # hoped-for tokens a second
    rate: float
    # those that are likely
    likely: float
    option: Option
    # slots of requests for which it is not drawn: their trees would cost more than they
    # bring
    left_out: frozenset[int] = frozenset()


def best_offer(
    option: Option,
    gains: Sequence[Gain],
    num_reqs: int,
    max_trees: int,
    plain: float,
    extra: float,
    is_timed: bool,
) -> Offer:
    """Draw an option for as many requests as promise the most tokens a second.

    Args:
        option: no plain one.
        gains: of the requests that may draft, the most first; one or more.
        num_reqs: all that run.
        max_trees: that a step may have, 1 or more.
        plain: seconds of a plain step.
        extra: that one takes longer in which each request has a whole tree.
        is_timed: whether the option was timed at this batch size.

    """
    tokens: float = num_reqs
    likely: float = num_reqs
    num_trees = behind = 0.0
    best = best_likely = 0.0
    num_drawn = 0
    for count, gain in enumerate(gains[:max_trees], start=1):
        tokens += gain.tokens
        likely += gain.likely
        num_trees += gain.share
        behind += gain.seconds
        # Fewer trees cost less, but more than their share.
        share = math.sqrt(num_trees / num_reqs)
        seconds = plain + extra * share + behind
        if tokens / seconds > best:
            best, best_likely = tokens / seconds, likely / seconds
            num_drawn = count if is_timed or not behind else FIRST_TRIED
    left_out = frozenset(left.slot for left in gains[num_drawn:])
    return Offer(best, best_likely, option, left_out)
