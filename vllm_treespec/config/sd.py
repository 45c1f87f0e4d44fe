"""SD: the chain of ordinary speculative decoding."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from vllm_treespec.config.base import (
    MAX_DRAFTS,
    Count,
    DraftModelConfig,
    MinProbability,
)
from vllm_treespec.proposers import Sd, sd
from vllm_treespec.trees.sizes import TreeSizes

DEPTH = 3


class SdConfig(DraftModelConfig):
    """A chain of draft tokens: ordinary speculative decoding."""

    SHAPE = ("depth", "min_probability")

    method: Literal["sd"]
    depth: Count = Field(default=DEPTH, le=MAX_DRAFTS, description="draft tokens")
    min_probability: MinProbability | None = None

    @property
    def sizes(self) -> TreeSizes:
        """How large its trees become."""
        return sd.sizes(self.depth)

    def proposer(self) -> Sd:
        """Make the proposer of its trees."""
        return Sd(**self.shape)

    @property
    def prunes_by_cost(self) -> bool:
        """Yes: likely drafts alone, and levels that are worth reading."""
        return True

    def smaller_shapes(self) -> list[dict[str, Any]]:
        """One draft token."""
        return [{"depth": 1}]
