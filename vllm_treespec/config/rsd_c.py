"""RSD-C: a tree with constant branching factors."""

from __future__ import annotations

from math import prod
from typing import Any, Literal

from pydantic import Field

from vllm_treespec.config.base import (
    MAX_DRAFTS,
    Count,
    DraftModelConfig,
    MinProbability,
)
from vllm_treespec.proposers import RsdC, rsd_c
from vllm_treespec.trees.sizes import TreeSizes

BRANCHING_FACTORS = (2, 1, 1)


class RsdCConfig(DraftModelConfig):
    """A tree with constant branching factors."""

    SHAPE = ("branching_factors", "min_probability")

    method: Literal["rsd_c"]
    branching_factors: tuple[Count, ...] = Field(
        default=BRANCHING_FACTORS,
        min_length=1,
        max_length=MAX_DRAFTS,
        description="children per node, by level",
    )
    min_probability: MinProbability | None = None

    @property
    def sizes(self) -> TreeSizes:
        """How large its trees become."""
        return rsd_c.sizes(self.branching_factors)

    def proposer(self) -> RsdC:
        """Make the proposer of its trees."""
        return RsdC(**self.shape)

    @property
    def prunes_by_cost(self) -> bool:
        """Yes: likely drafts alone, and levels that are worth reading."""
        return True

    def smaller_shapes(self) -> list[dict[str, Any]]:
        """One level of two draft tokens, of one."""
        width = prod(self.branching_factors)
        return [{"branching_factors": (min(n, width),)} for n in (2, 1)]
