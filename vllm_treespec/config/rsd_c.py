"""RSD-C: a tree with constant branching factors."""

from __future__ import annotations

from math import prod
from typing import Any, Literal

from pydantic import Field

from vllm_treespec.config.base import MAX_DRAFTS, Count, DraftModelConfig
from vllm_treespec.core.sizes import TreeSizes
from vllm_treespec.proposers import rsd_c

BRANCHING_FACTORS = (2, 1, 1)


class RsdCConfig(DraftModelConfig):
    """A tree with constant branching factors."""

    SHAPE = ("branching_factors",)

    method: Literal["rsd_c"]
    branching_factors: tuple[Count, ...] = Field(
        default=BRANCHING_FACTORS,
        min_length=1,
        max_length=MAX_DRAFTS,
        description="children per node, by level",
    )

    @property
    def sizes(self) -> TreeSizes:
        """How large its trees become."""
        return rsd_c.sizes(self.branching_factors)

    def smaller_shapes(self) -> list[tuple[dict[str, Any], int]]:
        """One level of four draft tokens, then of two."""
        width = prod(self.branching_factors)
        return [
            ({"branching_factors": (min(4, width),)}, 1),
            ({"branching_factors": (min(2, width),)}, 2),
        ]
