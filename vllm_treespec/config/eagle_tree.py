"""EAGLE: trees from a head that reads the target's hidden states of all tokens."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from vllm_treespec.config.heads import GrownTreeConfig
from vllm_treespec.heads import EagleHeadConfig, read_head_config
from vllm_treespec.proposers import Proposer, StaticTree, static_tree
from vllm_treespec.proposers.static_tree import RANK_ACCURACIES
from vllm_treespec.trees.sizes import TreeSizes


class EagleTreeConfig(GrownTreeConfig):
    """Trees from an EAGLE head."""

    READ_SHAPE = ("top_k", "depth")
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
