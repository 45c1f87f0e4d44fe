"""Suffix: a tree of what followed earlier occurrences of the last tokens."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field, NonNegativeInt

from vllm_treespec.config.base import Count, DraftCount, MethodConfig, MinProbability
from vllm_treespec.proposers import Suffix, suffix
from vllm_treespec.scorers.base import Rule
from vllm_treespec.scorers.coupled_draw import COUPLED_DRAW
from vllm_treespec.sources.suffix_index import SuffixIndex
from vllm_treespec.trees.sizes import TreeSizes


class IndexConfig(MethodConfig):
    """What methods share that draft from a suffix index."""

    SHAPE: ClassVar[tuple[str, ...]] = ("num_drafts", "depth", "min_probability")

    num_drafts: DraftCount = Field(default=32, description="draft tokens at most")
    depth: DraftCount = Field(default=28, description="levels below the root")
    min_probability: MinProbability | None = None
    max_match: Count = Field(
        default=16, le=256, description="last tokens to look up at most"
    )
    max_cached_tokens: NonNegativeInt = Field(
        default=2**16,
        strict=True,
        le=2**20,
        description="of earlier requests' outputs",
    )

    @property
    def rule(self) -> Rule:
        """Drafts that were not drawn have no distribution to reject by."""
        return COUPLED_DRAW

    @property
    def prunes_by_cost(self) -> bool:
        """Yes: an adaptive schedule needs no smaller trees of an index."""
        return True

    def text_source(self) -> SuffixIndex:
        """Make the index, with an empty cache, for the deepest tree of the schedule."""
        depth = max(tree.config.sizes.max_depth for tree in self.scheduled_trees())
        return SuffixIndex(depth, self.max_match, self.max_cached_tokens)


class SuffixTreeConfig(IndexConfig):
    """What followed earlier occurrences of the last tokens; no draft model."""

    method: Literal["suffix_tree"]

    @property
    def sizes(self) -> TreeSizes:
        """How large its trees become."""
        return suffix.sizes(self.num_drafts, self.depth)

    def proposer(self) -> Suffix:
        """Make the proposer of its trees."""
        return Suffix(**self.shape)
