"""RSD-C: a tree with constant branching factors."""

from __future__ import annotations

from math import prod
from typing import Any, Literal

from pydantic import Field

from vllm_treespec.config.base import MAX_DRAFTS, Count, FilteredTreeConfig
from vllm_treespec.proposers import RsdC, rsd_c
from vllm_treespec.trees.sizes import TreeSizes


class RsdCConfig(FilteredTreeConfig):
    """A tree with constant branching factors."""

    SHAPE = ("branching_factors", "min_probability")

    method: Literal["rsd_c"]
    branching_factors: tuple[Count, ...] = Field(
        default=(2, 1, 1),
        min_length=1,
        max_length=MAX_DRAFTS,
        description="children per node, by level",
    )

    @property
    def sizes(self) -> TreeSizes:
        """How large its trees become."""
        return rsd_c.sizes(self.branching_factors)

    def proposer(self) -> RsdC:
        """Make the proposer of its trees."""
        return RsdC(**self.shape)

    def smaller_shapes(self) -> list[dict[str, Any]]:
        """One level of two draft tokens, of one."""
        width = prod(self.branching_factors)
        return [{"branching_factors": (min(n, width),)} for n in (2, 1)]
