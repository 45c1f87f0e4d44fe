"""Tiers: how many query rows each request brings to a step that has a CUDA graph.

vLLM captures full graphs for batches in which all requests bring equally many rows. Its
key ``num_speculative_tokens_per_batch_size`` names several such numbers: the largest
tree's, powers of two below it, and 1 for steps without trees. A batch of trees is
filled up to one of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

# vLLM captures batches whose numbers of rows are multiples of it.
SMALLEST = 8


def tiers(max_nodes: int) -> tuple[int, ...]:
    """Numbers of rows, ascending, of trees with up to ``max_nodes`` nodes."""
    largest = -(-max_nodes // SMALLEST) * SMALLEST
    powers = (1 << exponent for exponent in range(SMALLEST.bit_length() - 1, 16))
    return (1, *(rows for rows in powers if rows < largest), largest)


def drafts_by_batch_size(max_nodes: int) -> list[tuple[int, int, int]]:
    """vLLM's key for these tiers.

    Its batch sizes mean nothing here: our scheduler reserves by request. They only
    have to differ, so that the most important tiers come first: an engine that runs
    one request at a time has graphs for the first of them alone.
    """
    plain, *others, largest = tiers(max_nodes)
    order = (largest, plain, *reversed(others))
    return [(size, size, rows - 1) for size, rows in enumerate(order, start=1)]


def fitting(rows: int, of: Sequence[int]) -> int:
    """The largest tier of at most so many rows; the rows where all trees' are larger.

    Args:
        rows: that a request may bring.
        of: tiers, ascending.

    """
    return max((tier for tier in of if SMALLEST <= tier <= rows), default=rows)


def enough(rows: int, of: Sequence[int]) -> int:
    """The smallest tier of at least so many rows; there is one."""
    return min(tier for tier in of if tier >= rows)


def can_fill(
    num_tokens: Mapping[str, int], reserved: Mapping[str, Sequence[int]], tier: int
) -> bool:
    """Whether every request of a step has room for as many rows, and no others.

    Args:
        num_tokens: that the scheduler gave each request.
        reserved: placeholders among them, by request.
        tier: rows of each request.

    """
    return all(
        num_tokens[req_id] == 1 + len(reserved.get(req_id, ()))
        and num_tokens[req_id] >= tier
        for req_id in num_tokens
    )
