"""ReDrafter: beam search over a recurrent head."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, ValidationInfo, field_validator

from vllm_treespec.config.base import DraftCount
from vllm_treespec.config.heads import DynamicMinProbability, DynamicTreeConfig
from vllm_treespec.proposers import (
    DynamicTree,
    Proposer,
    ReDrafter,
    RsdS,
    dynamic_tree,
    redrafter,
    rsd_s,
)
from vllm_treespec.scorers.base import Rule
from vllm_treespec.scorers.recursive_rejection import RECURSIVE_REJECTION
from vllm_treespec.trees.sizes import TreeSizes

NUM_DRAFTS = 5


class ReDrafterConfig(DynamicTreeConfig):
    """Beam search over a recurrent head."""

    SHAPE = ("beam_width", "length", "num_drafts", "min_probability")
    HEAD = "redrafter"
    NEEDS = "a ReDrafter head"

    method: Literal["redrafter"]
    beam_width: DraftCount = Field(default=4, description="beams")
    length: DraftCount = Field(default=2, description="draft tokens of each beam")
    beam_search: Literal["deterministic", "stochastic"] = Field(
        default="deterministic",
        description="stochastic: beams are drawn; they are verified by recursive "
        "rejection, which uses the head's probabilities",
    )
    # A null becomes one of the two when validated.
    tree: Literal["beams", "dynamic"] | None = Field(
        default=None,
        validate_default=True,
        description="dynamic: the likeliest nodes of all levels, whether a beam ends "
        "below them or not; beam_width are read of each level; beams: whole beams, as "
        "in the paper; null: dynamic, but for a stochastic beam",
    )
    # A null becomes NUM_DRAFTS when validated, but for a stochastic beam.
    num_drafts: DraftCount | None = Field(
        default=None,
        validate_default=True,
        description="draft tokens at most, the likeliest are kept; null: "
        f"{NUM_DRAFTS}, and all of a stochastic beam",
    )
    min_probability: DynamicMinProbability = None

    @property
    def rule(self) -> Rule:
        """Drawn beams have a distribution to reject by."""
        if self.tree != "dynamic" and self.beam_search == "stochastic":
            return RECURSIVE_REJECTION
        return super().rule

    @property
    def sizes(self) -> TreeSizes:
        """How large its trees become."""
        if self.num_drafts is None:  # all of a stochastic beam
            return rsd_s.sizes(self.beam_width, self.length)
        if self.tree == "dynamic":
            return dynamic_tree.sizes(self.beam_width, self.length, self.num_drafts)
        return redrafter.sizes(self.beam_width, self.length, self.num_drafts)

    def proposer(self) -> Proposer:
        """Make the proposer of this kind of tree."""
        if self.num_drafts is None:  # all of a stochastic beam
            return RsdS(self.beam_width, self.length)
        if self.tree == "dynamic":
            return DynamicTree(
                self.beam_width,
                self.length,
                self.num_drafts,
                self.min_probability or 0.0,
            )
        return ReDrafter(self.beam_width, self.length, self.num_drafts)

    @property
    def prunes_by_cost(self) -> bool:
        """Whether its trees are dynamic ones."""
        return self.tree == "dynamic"

    @field_validator("tree")
    @classmethod
    def _dynamic_trees_are_not_drawn(
        cls, tree: str | None, info: ValidationInfo
    ) -> str:
        if info.data.get("beam_search") != "stochastic":
            return tree or "dynamic"
        if tree == "dynamic":
            raise ValueError(
                "a dynamic tree holds the likeliest tokens and a stochastic beam drawn "
                "ones; remove 'tree', or write 'beam_search' 'deterministic'"
            )
        return "beams"

    @field_validator("num_drafts")
    @classmethod
    def _drawn_beams_are_kept(
        cls, num_drafts: int | None, info: ValidationInfo
    ) -> int | None:
        if info.data.get("beam_search") != "stochastic":
            return num_drafts or NUM_DRAFTS
        if num_drafts is not None:
            raise ValueError(
                "a stochastic beam keeps all beam_width x length draft tokens; remove "
                "'num_drafts', or write 'beam_search' 'deterministic'"
            )
        return None
