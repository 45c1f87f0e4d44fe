"""Lyanna: trees over a chain of hidden states that reads no drafted token."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, ValidationInfo, field_validator

from vllm_treespec.config.base import DraftCount
from vllm_treespec.config.heads import GrownTree, GrownTreeConfig, NumDrafts
from vllm_treespec.proposers import DynamicTree, Lyanna, dynamic_tree, lyanna
from vllm_treespec.sources.chain import Resample
from vllm_treespec.trees.sizes import TreeSizes


class LyannaConfig(GrownTreeConfig):
    """Trees over a chain of hidden states."""

    SHAPE = (*GrownTreeConfig.SHAPE, "resample_drafts")
    HEAD = "lyanna"
    NEEDS = "a Lyanna head"

    method: Literal["lyanna"]
    tree: GrownTree = "dynamic"
    num_drafts: NumDrafts = 12
    resample: Resample = Field(
        default="off",
        description="levels that the last step did not use; off: dropped; replace: "
        "drafted from in place of a new chain; merge: beside it",
    )
    resample_drafts: DraftCount = Field(
        default=4,
        description="merge: draft tokens from the levels that are left, at most",
    )
    resample_min_levels: DraftCount = Field(
        default=1, description="fewer levels that are left are dropped"
    )

    @property
    def shape(self) -> dict[str, Any]:
        """The keys that shape the tree; only merged trees have a second part."""
        keys = super().shape
        if self.resample != "merge":
            del keys["resample_drafts"]
        return keys

    @property
    def prunes_by_cost(self) -> bool:
        """Whether its trees are dynamic ones of one chain."""
        return super().prunes_by_cost and self.resample != "merge"

    @property
    def sizes(self) -> TreeSizes:
        """How large its trees become."""
        left = self._leftover_shape
        leftover = None if left is None else dynamic_tree.sizes(*left)
        return lyanna.sizes(self.grown_sizes, leftover)

    @property
    def _leftover_shape(self) -> tuple[int, int, int] | None:
        """Shape of the second part of its trees; one level is used up."""
        depth = self.grown_sizes.max_depth
        if self.resample != "merge" or depth == 1:
            return None
        return self.top_k, depth - 1, self.resample_drafts

    def proposer(self) -> Lyanna:
        """Make the proposer."""
        left = self._leftover_shape
        if left is None:
            return Lyanna(self.grower())
        return Lyanna(self.grower(), DynamicTree(*left, self.min_probability or 0.0))

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

    @field_validator("resample_drafts")
    @classmethod
    def _only_merged_trees_have_a_second_part(
        cls, resample_drafts: int, info: ValidationInfo
    ) -> int:
        default = cls.model_fields["resample_drafts"].default
        if info.data.get("resample") != "merge" and resample_drafts != default:
            raise ValueError("it is for 'resample' 'merge'; remove it, or write that")
        return resample_drafts
