"""Hybrid: a suffix index and a draft model, or a head, in one tree."""

from __future__ import annotations

from typing import Any, Literal, Self, get_args

from pydantic import Field, NonNegativeInt, model_validator

from vllm_treespec.config.base import MAX_DRAFTS, DraftCount, DraftModelsConfig
from vllm_treespec.config.suffix_tree import IndexConfig
from vllm_treespec.proposers import Hybrid, hybrid
from vllm_treespec.trees.sizes import TreeSizes
from vllm_treespec.trees.source import Source

# What may draft beside the index.
HeadKind = Literal["redrafter", "eagle", "dflash", "lyanna"]
HEAD_KINDS: tuple[HeadKind, ...] = get_args(HeadKind)


class HybridConfig(IndexConfig, DraftModelsConfig):
    """A suffix index and a model's likeliest tokens in one tree."""

    READ_SHAPE = ("top_k", "model_depth")
    SHAPE = (*IndexConfig.SHAPE, *READ_SHAPE)
    NEEDS = "a draft model or a head"

    method: Literal["hybrid"]
    model: str = Field(
        min_length=1, description="folder or hub id of the draft model or the head"
    )
    drafter: Literal["draft_model", HeadKind] = Field(
        default="draft_model", description="what 'model' is: a draft model or a head"
    )
    top_k: DraftCount = Field(
        default=4,
        description="of the model's part: children per node, and nodes of each level "
        "that get children",
    )
    model_depth: NonNegativeInt = Field(
        default=6,
        le=MAX_DRAFTS,
        strict=True,
        description="levels of the model's part; 0, for a schedule: the index drafts "
        "alone",
    )

    @property
    def models(self) -> tuple[str, ...]:
        """The draft model, if it is one."""
        return (self.model,) if self.drafter == "draft_model" else ()

    @property
    def head(self) -> str | None:
        """The head, if it is one."""
        return None if self.head_kind is None else self.model

    @property
    def head_kind(self) -> str | None:
        """The kind of the head, if it is one."""
        return None if self.drafter == "draft_model" else self.drafter

    @property
    def shape_name(self) -> str:
        """Both parts: ``32x28+eagle 4x6``; of the index alone: ``32x28``."""
        index = self._short_shape(IndexConfig.SHAPE)
        if not self.model_depth:
            return index
        return f"{index}+{self.drafter} {self._short_shape(self.READ_SHAPE)}"

    @property
    def sizes(self) -> TreeSizes:
        """How large its trees become."""
        shape = self.num_drafts, self.depth, self.top_k, self.model_depth
        return hybrid.sizes(*shape, one_pass=self.drafter == "dflash")

    def proposer(self) -> Hybrid:
        """Make the proposer of its trees."""
        return Hybrid(**self.shape, one_pass=self.drafter == "dflash")

    @property
    def sources(self) -> Source:
        """The index, and the model if it has levels."""
        return Source.INDEX | Source.MODEL if self.model_depth else Source.INDEX

    def smaller_shapes(self) -> list[dict[str, Any]]:
        """The index alone."""
        return [{"model_depth": 0}]

    @model_validator(mode="after")
    def _hot_tokens_are_a_draft_models(self) -> Self:
        if self.hot_tokens is not None and not self.models:
            raise ValueError(
                "'hot_tokens' is for draft models, a head has its own; remove it"
            )
        return self
