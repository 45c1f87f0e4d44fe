"""Medusa: a tree of fixed shape, filled by one head a level."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from vllm_treespec.config.base import DraftCount
from vllm_treespec.config.heads import HeadMethodConfig
from vllm_treespec.heads import MedusaHeadConfig, read_head_config
from vllm_treespec.proposers import Medusa, Proposer, medusa
from vllm_treespec.trees.sizes import TreeSizes


class MedusaTreeConfig(HeadMethodConfig):
    """A tree of fixed shape, filled by one head a level."""

    SHAPE = ("num_drafts",)
    HEAD = "medusa"
    NEEDS = "a Medusa head"

    method: Literal["medusa_tree"]
    num_drafts: DraftCount = Field(default=5, description="draft tokens")

    @property
    def sizes(self) -> TreeSizes:
        """Bounds on its tree, which the proposer knows once it has read the head."""
        return medusa.sizes(self.num_drafts)

    def proposer(self) -> Proposer:
        """Make the proposer, with the tree that suits the head's accuracies.

        Raises:
            HeadError: the head's configuration cannot be read.
            ValueError: when the accuracies give no tree.

        """
        head = read_head_config(Path(self.model))
        assert isinstance(head, MedusaHeadConfig)
        return Medusa(self.num_drafts, head.rank_accuracies)

    def smaller_shapes(self) -> list[dict[str, Any]]:
        """Five draft tokens, then three, then two."""
        return [{"num_drafts": min(n, self.num_drafts)} for n in (5, 3, 2)]
