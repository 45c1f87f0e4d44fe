"""DFlash, DSpark, JetSpec: trees from a head that drafts all levels in one forward."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, ValidationInfo, field_validator

from vllm_treespec.config.base import MAX_DRAFTS, Count
from vllm_treespec.config.heads import GrownTreeConfig, num_drafts_field
from vllm_treespec.heads import DFlashHeadConfig, read_head_config
from vllm_treespec.proposers import DFlash, dflash
from vllm_treespec.trees.sizes import TreeSizes


def default_parents(model: str, top_k: int) -> int:
    """Nodes of a level that get children: one where their tokens tell nothing.

    Args:
        model: folder or hub id of the head.
        top_k: of the tree.

    Raises:
        HeadError: the head's configuration cannot be read.

    """
    head = read_head_config(model)
    assert isinstance(head, DFlashHeadConfig)
    return top_k if head.conditional else 1


class DFlashTreeConfig(GrownTreeConfig):
    """Trees from a head of DFlash's kind."""

    SHAPE = (*GrownTreeConfig.SHAPE, "num_parents")
    HEAD = "dflash"
    NEEDS = "a DFlash, DSpark or JetSpec head"

    method: Literal["dflash_tree"]
    tree: Literal["dynamic", "stochastic"] = Field(
        default="dynamic",
        description="dynamic: the likeliest nodes; stochastic: drawn, and verified by "
        "recursive rejection",
    )
    top_k: Count = Field(default=4, le=MAX_DRAFTS, description="children per node")
    depth: Count = Field(
        default=7,
        le=MAX_DRAFTS - 1,
        description="levels below the root, at most as many as the head drafts",
    )
    num_drafts: Count | None = num_drafts_field(16)
    num_parents: Count | None = Field(
        default=None,
        le=MAX_DRAFTS,
        description="nodes of each level that get children; null: top_k if the head "
        "conditions on a node's token (DSpark, DFlash2), else 1",
    )

    @property
    def sizes(self) -> TreeSizes:
        """How large its trees become."""
        return dflash.sizes(self.grown_sizes)

    def proposer(self) -> DFlash:
        """Make the proposer; the head's folder says whether it is conditional.

        Raises:
            HeadError: the head's configuration cannot be read.

        """
        if self.tree == "stochastic":
            return DFlash(self.grower())
        num_parents = self.num_parents or default_parents(self.model, self.top_k)
        return DFlash(self.grower(num_parents))

    def smaller_shapes(self) -> list[dict[str, Any]]:
        """Smaller trees, whose levels have no more parents than children."""
        shapes = super().smaller_shapes()
        if self.num_parents is None:
            return shapes
        return [
            {**shape, "num_parents": min(self.num_parents, shape["top_k"])}
            for shape in shapes
        ]

    @field_validator("num_parents")
    @classmethod
    def _parents_are_children(
        cls, num_parents: int | None, info: ValidationInfo
    ) -> int | None:
        most = info.data.get("top_k", MAX_DRAFTS)
        if num_parents is not None and num_parents > most:
            raise ValueError(f"at most 'top_k' {most} nodes are read; lower it")
        if num_parents is not None and info.data.get("tree") == "stochastic":
            raise ValueError(
                "a stochastic tree has children below top_k nodes of each level; "
                "remove it, or write 'tree' 'dynamic'"
            )
        return num_parents
