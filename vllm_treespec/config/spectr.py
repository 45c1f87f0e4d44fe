"""SpecTr: independent paths from one draft model."""

from __future__ import annotations

from math import ceil
from typing import Any, Literal

from pydantic import Field

from vllm_treespec.config.base import DraftCount, DraftModelConfig
from vllm_treespec.proposers import SpecTr, spectr
from vllm_treespec.scorers import RULES, Rule
from vllm_treespec.trees.sizes import TreeSizes


class SpecTrConfig(DraftModelConfig):
    """Independent paths from one draft model."""

    SHAPE = ("num_paths", "depth")

    method: Literal["spectr"]
    num_paths: DraftCount = Field(default=2, description="independent paths")
    depth: DraftCount = Field(default=3, description="draft tokens of each path")
    scorer: Literal["k_seq", "multi_round"] = Field(
        default="k_seq", description="verification rule"
    )

    @property
    def rule(self) -> Rule:
        """The rule that the spec-config names."""
        return RULES[self.scorer]

    @property
    def sizes(self) -> TreeSizes:
        """How large its trees become."""
        return spectr.sizes(self.num_paths, self.depth)

    def proposer(self) -> SpecTr:
        """Make the proposer of its trees."""
        return SpecTr(**self.shape)

    def smaller_shapes(self) -> list[dict[str, Any]]:
        """Half the depth, then one level of four draft tokens, of two, of one."""
        return [
            {"depth": ceil(self.depth / 2)},
            *({"num_paths": min(n, self.num_paths), "depth": 1} for n in (4, 2, 1)),
        ]
