"""Batch sizes that the adaptive scheduler tells apart."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable

# Batch sizes up to which costs are measured together.
BATCH_SIZES = (1, 2, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)


def size_group(num_reqs: int) -> int:
    """The largest batch size whose steps are measured together with this one's."""
    return BATCH_SIZES[min(bisect_left(BATCH_SIZES, num_reqs), len(BATCH_SIZES) - 1)]


def nearest_size(sizes: Iterable[int], batch_size: int) -> int | None:
    """The batch size that is nearest, by ratio, then smaller; None without any."""
    return min(
        sizes,
        key=lambda size: (max(size, batch_size) / min(size, batch_size), size),
        default=None,
    )
