"""EAGLE: trees from a head that reads the target's hidden states of all tokens."""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import Field, ValidationInfo, field_validator, model_validator

from vllm_treespec.config.base import MAX_DRAFTS, Count
from vllm_treespec.config.heads import HeadMethodConfig, refuse_no_limit, smaller_trees
from vllm_treespec.core.sizes import TreeSizes
from vllm_treespec.heads import EagleHeadConfig, read_head_config
from vllm_treespec.proposers import (
    DynamicTree,
    Proposer,
    RsdS,
    StaticTree,
    StochasticTree,
    dynamic_tree,
    rsd_s,
    static_tree,
    stochastic_tree,
)
from vllm_treespec.proposers.static_tree import RANK_ACCURACIES

TOP_K = 4
DEPTH = 3
NUM_DRAFTS = 8
SIZES = {
    "dynamic": dynamic_tree.sizes,
    "static": static_tree.sizes,
    "stochastic": stochastic_tree.sizes,
}


class EagleTreeConfig(HeadMethodConfig):
    """Trees from an EAGLE head."""

    SHAPE = ("top_k", "depth", "num_drafts")
    HEAD = "eagle"

    method: Literal["eagle_tree"]
    tree: Literal["dynamic", "static", "stochastic"] = Field(
        default="dynamic",
        description="dynamic: the likeliest nodes; static: one shape for all steps; "
        "stochastic: drawn, and verified by recursive rejection",
    )
    top_k: Count = Field(
        default=TOP_K,
        le=MAX_DRAFTS,
        description="children per node, and nodes that the head reads of each level",
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
    hot_tokens: str | None = Field(
        default=None,
        min_length=1,
        description="JSON file with a list of token ids to draft from, for a head "
        "without a draft vocabulary of its own",
    )

    @property
    def rule(self) -> str:
        """Drawn trees have a distribution to reject by, the others have none."""
        if self.tree == "stochastic":
            return "recursive_rejection"
        return super().rule

    @property
    def sizes(self) -> TreeSizes:
        """How large its trees become; a bound on a static tree."""
        if self.num_drafts is None:
            return rsd_s.sizes(self.top_k, self.depth)
        return SIZES[self.tree](self.top_k, self.depth, self.num_drafts)

    def proposer(self) -> Proposer:
        """Make the proposer; a static tree grows by what the head's folder says."""
        if self.num_drafts is None:
            return RsdS(self.top_k, self.depth)
        if self.tree == "dynamic":
            return DynamicTree(self.top_k, self.depth, self.num_drafts)
        if self.tree == "static":
            head = read_head_config(self.model)
            assert isinstance(head, EagleHeadConfig)
            accuracies = head.rank_accuracies or RANK_ACCURACIES
            return StaticTree(self.top_k, self.depth, self.num_drafts, accuracies)
        return StochasticTree(self.top_k, self.depth, self.num_drafts)

    def smaller_shapes(self) -> list[tuple[dict[str, Any], int]]:
        """Two levels of five draft tokens, then one of four, then of two."""
        return smaller_trees(self.top_k, self.depth, self.num_drafts)

    def drafting_cost(self, depth: int) -> float:
        """One pass of the head a level."""
        return 0.11 * depth

    @field_validator("num_drafts")
    @classmethod
    def _only_levels_of_draws_have_a_width(
        cls, num_drafts: int | None, info: ValidationInfo
    ) -> int | None:
        if num_drafts is None:
            refuse_no_limit(info.data.get("tree"), NUM_DRAFTS)
        return num_drafts

    @model_validator(mode="after")
    def _head_reads_what_masks_hold(self) -> Self:
        num_read = self.sizes.draft_nodes
        if num_read > MAX_DRAFTS:
            raise ValueError(
                f"the head reads {num_read} nodes of a tree, top_k x (depth - 1), and "
                f"at most {MAX_DRAFTS} fit; lower 'top_k' or 'depth'"
            )
        return self
