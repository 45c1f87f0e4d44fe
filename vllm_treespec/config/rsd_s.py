"""RSD-S: a tree drawn by stochastic beam search."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from vllm_treespec.config.base import (
    MAX_DRAFTS,
    Count,
    DraftModelConfig,
    MinProbability,
)
from vllm_treespec.proposers import RsdS, rsd_s
from vllm_treespec.trees.sizes import TreeSizes

BEAM_WIDTH = 2
DEPTH = 3


class RsdSConfig(DraftModelConfig):
    """A tree drawn by stochastic beam search."""

    SHAPE = ("beam_width", "depth", "min_probability")

    method: Literal["rsd_s"]
    beam_width: Count = Field(
        default=BEAM_WIDTH, le=MAX_DRAFTS, description="nodes per level"
    )
    depth: Count = Field(
        default=DEPTH, le=MAX_DRAFTS, description="levels below the root"
    )
    min_probability: MinProbability | None = None

    @property
    def sizes(self) -> TreeSizes:
        """How large its trees become."""
        return rsd_s.sizes(self.beam_width, self.depth)

    def proposer(self) -> RsdS:
        """Make the proposer of its trees."""
        return RsdS(**self.shape)

    @property
    def prunes_by_cost(self) -> bool:
        """Yes: likely drafts alone, and levels that are worth reading."""
        return True

    def smaller_shapes(self) -> list[dict[str, Any]]:
        """One level of two draft tokens, of one."""
        return [{"beam_width": min(n, self.beam_width), "depth": 1} for n in (2, 1)]
