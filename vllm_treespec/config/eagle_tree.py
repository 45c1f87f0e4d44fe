"""EAGLE: trees from a head that reads the target's hidden states of all tokens."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from vllm_treespec.config.base import MAX_DRAFTS
from vllm_treespec.config.heads import GrownTreeConfig
from vllm_treespec.heads import EagleHeadConfig, read_head_config
from vllm_treespec.proposers import Proposer, StaticTree, static_tree
from vllm_treespec.proposers.static_tree import RANK_ACCURACIES
from vllm_treespec.trees.sizes import TreeSizes


class EagleTreeConfig(GrownTreeConfig):
    """Trees from an EAGLE head."""

    HEAD = "eagle"
    NEEDS = "an EAGLE head"

    method: Literal["eagle_tree"]
    tree: Literal["dynamic", "static", "stochastic"] = Field(
        default="dynamic",
        description="dynamic: the likeliest nodes; static: one shape for all steps; "
        "stochastic: drawn, and verified by recursive rejection",
    )
    hot_tokens: str | None = Field(
        default=None,
        min_length=1,
        description="JSON file with a list of token ids to draft from, for a head "
        "without a draft vocabulary of its own",
    )

    @property
    def sizes(self) -> TreeSizes:
        """How large its trees become; a bound on a static tree."""
        if self.tree == "static":
            assert self.num_drafts is not None
            return static_tree.sizes(self.top_k, self.depth, self.num_drafts)
        return self.grown_sizes

    def proposer(self) -> Proposer:
        """Make the proposer; a static tree grows by what the head's folder says."""
        if self.tree != "static":
            return self.grower()
        head = read_head_config(self.model)
        assert isinstance(head, EagleHeadConfig)
        assert self.num_drafts is not None
        accuracies = head.rank_accuracies or RANK_ACCURACIES
        return StaticTree(self.top_k, self.depth, self.num_drafts, accuracies)

    @model_validator(mode="after")
    def _head_reads_what_masks_hold(self) -> Self:
        num_read = self.sizes.draft_nodes
        if num_read > MAX_DRAFTS:
            raise ValueError(
                f"the head reads {num_read} nodes of a tree, top_k x (depth - 1), and "
                f"at most {MAX_DRAFTS} fit; lower 'top_k' or 'depth'"
            )
        return self
