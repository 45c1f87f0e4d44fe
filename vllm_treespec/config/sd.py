"""SD: the chain of ordinary speculative decoding."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from vllm_treespec.config.base import DraftCount, FilteredTreeConfig
from vllm_treespec.proposers import Sd, sd
from vllm_treespec.trees.sizes import TreeSizes


class SdConfig(FilteredTreeConfig):
    """A chain of draft tokens: ordinary speculative decoding."""

    SHAPE = ("depth", "min_probability")

    method: Literal["sd"]
    depth: DraftCount = Field(default=3, description="draft tokens")

    @property
    def sizes(self) -> TreeSizes:
        """How large its trees become."""
        return sd.sizes(self.depth)

    def proposer(self) -> Sd:
        """Make the proposer of its trees."""
        return Sd(**self.shape)

    def smaller_shapes(self) -> list[dict[str, Any]]:
        """One draft token."""
        return [{"depth": 1}]
