"""SpecInfer: trees of one or more draft models, merged."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field

from vllm_treespec.config.base import MAX_DRAFTS, Count, DraftModelsConfig
from vllm_treespec.proposers import SpecInfer, specinfer
from vllm_treespec.scorers.base import Rule
from vllm_treespec.scorers.multi_round import MULTI_ROUND
from vllm_treespec.trees.sizes import TreeSizes


class SpecInferDraft(BaseModel):
    """One draft model of SpecInfer and the tree that it draws."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: str = Field(min_length=1, description="folder or hub id of the draft model")
    branching_factors: tuple[Count, ...] = Field(
        default=(2, 1, 1),
        min_length=1,
        max_length=MAX_DRAFTS,
        description="draws per node, by level",
    )


class SpecInferConfig(DraftModelsConfig):
    """Trees of one or more draft models, merged."""

    NEEDS = "draft models"
    SHAPE = ("drafts",)

    method: Literal["specinfer"]
    drafts: tuple[SpecInferDraft, ...] = Field(
        min_length=1, description="draft models and their trees"
    )

    @property
    def models(self) -> tuple[str, ...]:
        """The draft models, in the order in which their draws are tried."""
        return tuple(draft.model for draft in self.drafts)

    @property
    def rule(self) -> Rule:
        """Several draft distributions at one node need multi-round rejection."""
        return MULTI_ROUND

    @property
    def shape(self) -> dict[str, Any]:
        """The draft models' trees."""
        return {"branching_factors": tuple(d.branching_factors for d in self.drafts)}

    @property
    def sizes(self) -> TreeSizes:
        """How large its trees become."""
        return specinfer.sizes([draft.branching_factors for draft in self.drafts])

    def proposer(self) -> SpecInfer:
        """Make the proposer of its trees."""
        return SpecInfer(**self.shape)

    def with_shape(self, shape: Mapping[str, Any]) -> Self:
        """Make a spec-config with other trees of the same draft models."""
        changed = super().with_shape(shape)
        if changed.models != self.models:
            raise ValueError(
                f"'schedule' has an entry with draft models {list(changed.models)}; "
                f"write {list(self.models)}, only the branching factors may differ"
            )
        return changed
