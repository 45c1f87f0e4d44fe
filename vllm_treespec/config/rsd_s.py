"""RSD-S: a tree drawn by stochastic beam search."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from vllm_treespec.config.base import DraftCount, FilteredTreeConfig
from vllm_treespec.proposers import RsdS, rsd_s
from vllm_treespec.trees.sizes import TreeSizes


class RsdSConfig(FilteredTreeConfig):
    """A tree drawn by stochastic beam search."""

    SHAPE = ("beam_width", "depth", "min_probability")

    method: Literal["rsd_s"]
    beam_width: DraftCount = Field(default=2, description="nodes per level")
    depth: DraftCount = Field(default=3, description="levels below the root")

    @property
    def sizes(self) -> TreeSizes:
        """How large its trees become."""
        return rsd_s.sizes(self.beam_width, self.depth)

    def proposer(self) -> RsdS:
        """Make the proposer of its trees."""
        return RsdS(**self.shape)

    def smaller_shapes(self) -> list[dict[str, Any]]:
        """One level of two draft tokens, of one."""
        return [{"beam_width": min(n, self.beam_width), "depth": 1} for n in (2, 1)]
