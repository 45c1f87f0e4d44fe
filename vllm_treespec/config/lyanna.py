"""Lyanna: trees over a chain of hidden states that reads no drafted token."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, ValidationInfo, field_validator

from vllm_treespec.config.base import MAX_DRAFTS, Count
from vllm_treespec.config.heads import HeadMethodConfig, refuse_no_limit, smaller_trees
from vllm_treespec.core.sizes import TreeSizes
from vllm_treespec.proposers import (
    DynamicTree,
    Lyanna,
    Proposer,
    RsdS,
    StochasticTree,
    dynamic_tree,
    lyanna,
    rsd_s,
    stochastic_tree,
)
from vllm_treespec.sources.chain import Resample

TOP_K = 4
DEPTH = 3
NUM_DRAFTS = 12
RESAMPLE_DRAFTS = 4


class LyannaConfig(HeadMethodConfig):
    """Trees over a chain of hidden states."""

    SHAPE = ("top_k", "depth", "num_drafts", "resample_drafts")
    HEAD = "lyanna"

    method: Literal["lyanna"]
    tree: Literal["dynamic", "stochastic"] = Field(
        default="dynamic",
        description="dynamic: the likeliest nodes; stochastic: drawn, and verified by "
        "recursive rejection",
    )
    top_k: Count = Field(
        default=TOP_K,
        le=MAX_DRAFTS,
        description="children per node, and nodes of each level that get children",
    )
    depth: Count = Field(
        default=DEPTH, le=MAX_DRAFTS, description="levels below the root"
    )
    num_drafts: Count | None = Field(
        default=NUM_DRAFTS,
        le=MAX_DRAFTS,
        description="draft tokens at most, the best of all levels are kept; null, for "
        "a stochastic tree: top_k of each level",
    )
    resample: Resample = Field(
        default="off",
        description="levels that the last step did not use; off: dropped; replace: "
        "drafted from in place of a new chain; merge: beside it",
    )
    resample_drafts: Count = Field(
        default=RESAMPLE_DRAFTS,
        le=MAX_DRAFTS,
        description="merge: draft tokens from the levels that are left, at most",
    )
    resample_min_levels: Count = Field(
        default=1, le=MAX_DRAFTS, description="fewer levels that are left are dropped"
    )

    @property
    def rule(self) -> str:
        """Drawn trees have a distribution to reject by, the others have none."""
        if self.tree == "stochastic":
            return "recursive_rejection"
        return super().rule

    @property
    def shape(self) -> dict[str, Any]:
        """The keys that shape the tree; only merged trees have a second part."""
        keys = super().shape
        if self.resample != "merge":
            del keys["resample_drafts"]
        return keys

    @property
    def sizes(self) -> TreeSizes:
        """How large its trees become."""
        width, depth = self.top_k, self.depth
        if self.num_drafts is None:
            return lyanna.sizes(rsd_s.sizes(width, depth))
        if self.tree == "stochastic":
            return lyanna.sizes(stochastic_tree.sizes(width, depth, self.num_drafts))
        tree = dynamic_tree.sizes(width, depth, self.num_drafts)
        left = self._leftover_shape(tree.max_depth)
        return lyanna.sizes(tree, None if left is None else dynamic_tree.sizes(*left))

    def _leftover_shape(self, depth: int) -> tuple[int, int, int] | None:
        """Shape of the second part of trees of so many levels; one is used up."""
        if self.resample != "merge" or depth == 1:
            return None
        return self.top_k, depth - 1, self.resample_drafts

    def proposer(self) -> Proposer:
        """Make the proposer."""
        width, depth = self.top_k, self.depth
        if self.num_drafts is None:
            return Lyanna(RsdS(width, depth))
        if self.tree == "stochastic":
            return Lyanna(StochasticTree(width, depth, self.num_drafts))
        tree = DynamicTree(width, depth, self.num_drafts)
        left = self._leftover_shape(tree.depth)
        return Lyanna(tree, None if left is None else DynamicTree(*left))

    def smaller_shapes(self) -> list[tuple[dict[str, Any], int]]:
        """Two levels of five draft tokens, then one of four, then of two."""
        return smaller_trees(self.top_k, self.depth, self.num_drafts)

    def drafting_cost(self, depth: int) -> float:
        """A pass of the layer a level, one of the output layer; estimated."""
        return 0.04 + 0.04 * depth

    @field_validator("num_drafts")
    @classmethod
    def _only_levels_of_draws_have_a_width(
        cls, num_drafts: int | None, info: ValidationInfo
    ) -> int | None:
        if num_drafts is None:
            refuse_no_limit(info.data.get("tree"), NUM_DRAFTS)
        return num_drafts

    @field_validator("resample")
    @classmethod
    def _drawn_trees_are_not_merged(
        cls, resample: Resample, info: ValidationInfo
    ) -> Resample:
        if resample == "merge" and info.data.get("tree") == "stochastic":
            raise ValueError(
                "a stochastic tree is drawn from one chain, and a merged one holds the "
                "likeliest tokens of two; write 'resample' 'replace', or 'tree' "
                "'dynamic'"
            )
        return resample
