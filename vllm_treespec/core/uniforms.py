"""Uniform numbers for drafting and scoring, the only randomness of a step."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

DRAFTING, SCORING = 0, 1


class UniformSource:
    """Hands out uniform numbers per request.

    A request with a seed gets numbers that depend on its seed, the position of its
    root and the purpose alone: not on the batch, preemption or the number of steps
    before. Drafting and scoring share no numbers, except where a tree's drafts
    follow the noise that the target draws by (``coupling.py``). Requests without a
    seed share one generator, seeded alike on every rank, so that all ranks draw the
    same.
    """

    def __init__(self, seed: int) -> None:
        """Seed the shared generator."""
        self.shared = torch.Generator().manual_seed(seed)

    def draw(
        self,
        seeds: Sequence[int | None],
        positions: Sequence[int],
        count: int,
        purpose: int,
    ) -> Tensor:
        """Draw ``count`` numbers for each request.

        Args:
            seeds: per request, None without one.
            positions: of the requests' roots.
            count: numbers a request.
            purpose: ``DRAFTING`` or ``SCORING``.

        Returns:
            float64 [num_reqs, count] in [0, 1), on the CPU.

        """
        numbers = self.draw_shared(len(seeds), count)
        if not count:
            return numbers
        for row, (seed, position) in enumerate(zip(seeds, positions, strict=True)):
            if seed is not None:
                # A plain list of a large and a small integer would become float64.
                key = np.array([seed % 2**64, 2 * position + purpose], np.uint64)
                own = np.random.Generator(np.random.Philox(key=key))
                numbers[row] = torch.from_numpy(own.random(count))
        return numbers

    def draw_shared(self, num_reqs: int, count: int) -> Tensor:
        """Draw for requests without a seed, float64 [num_reqs, count] in [0, 1)."""
        shape = num_reqs, count
        if not count:
            return torch.empty(shape, dtype=torch.float64)
        return torch.rand(shape, generator=self.shared, dtype=torch.float64)
