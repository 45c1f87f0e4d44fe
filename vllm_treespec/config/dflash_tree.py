"""DFlash, DSpark, JetSpec: trees from a head that drafts all levels in one forward."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from vllm_treespec.config.base import MAX_DRAFTS, Count
from vllm_treespec.config.heads import GrownTree, GrownTreeConfig, NumDrafts, TopK
from vllm_treespec.proposers import DFlash, DrawnDFlash, dflash
from vllm_treespec.trees.sizes import TreeSizes


class DFlashTreeConfig(GrownTreeConfig):
    """Trees from a head of DFlash's kind."""

    HEAD = "dflash"
    NEEDS = "a DFlash, DSpark or JetSpec head"

    method: Literal["dflash_tree"]
    tree: GrownTree = "dynamic"
    top_k: TopK = 8
    depth: Count = Field(
        default=7,
        le=MAX_DRAFTS - 1,
        description="levels below the root, at most as many as the head drafts",
    )
    num_drafts: NumDrafts = 16

    @property
    def sizes(self) -> TreeSizes:
        """How large its trees become."""
        return dflash.sizes(self.grown_sizes)

    def proposer(self) -> DFlash | DrawnDFlash:
        """Make the proposer."""
        grower = self.grower(DFlash)
        return grower if isinstance(grower, DFlash) else DrawnDFlash(grower)
