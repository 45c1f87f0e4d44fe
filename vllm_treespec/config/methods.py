"""The spec-config of each method: one validated type each."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeInt,
    ValidationInfo,
    field_validator,
)

from vllm_treespec.config import defaults
from vllm_treespec.config.base import (
    MAX_DRAFTS,
    Count,
    DraftModelConfig,
    HeadMethodConfig,
    MethodConfig,
)
from vllm_treespec.heads import MedusaHeadConfig, read_head_config
from vllm_treespec.proposers import PROPOSERS, Proposer, RsdS, Suffix


class SdConfig(DraftModelConfig):
    """A chain of draft tokens: ordinary speculative decoding."""

    SHAPE = ("depth",)

    method: Literal["sd"]
    depth: Count = Field(
        default=defaults.SD_DEPTH, le=MAX_DRAFTS, description="draft tokens"
    )

    def smaller_shapes(self) -> list[tuple[dict[str, Any], int]]:
        """One draft token."""
        return [({"depth": 1}, 2)]


class RsdCConfig(DraftModelConfig):
    """A tree with constant branching factors."""

    SHAPE = ("branching_factors",)

    method: Literal["rsd_c"]
    branching_factors: tuple[Count, ...] = Field(
        default=defaults.RSD_C_BRANCHING_FACTORS,
        min_length=1,
        max_length=MAX_DRAFTS,
        description="children per node, by level",
    )

    def smaller_shapes(self) -> list[tuple[dict[str, Any], int]]:
        """One level of four draft tokens, then of two."""
        width = prod(self.branching_factors)
        return [
            ({"branching_factors": (min(4, width),)}, 1),
            ({"branching_factors": (min(2, width),)}, 2),
        ]


class RsdSConfig(DraftModelConfig):
    """A tree drawn by stochastic beam search."""

    SHAPE = ("beam_width", "depth")

    method: Literal["rsd_s"]
    beam_width: Count = Field(
        default=defaults.RSD_S_BEAM_WIDTH, le=MAX_DRAFTS, description="nodes per level"
    )
    depth: Count = Field(
        default=defaults.RSD_S_DEPTH,
        le=MAX_DRAFTS,
        description="levels below the root",
    )

    def smaller_shapes(self) -> list[tuple[dict[str, Any], int]]:
        """One level of four draft tokens, then of two."""
        return [
            ({"beam_width": min(4, self.beam_width), "depth": 1}, 1),
            ({"beam_width": min(2, self.beam_width), "depth": 1}, 2),
        ]


class SpecTrConfig(DraftModelConfig):
    """Independent paths from one draft model."""

    SHAPE = ("num_paths", "depth")

    method: Literal["spectr"]
    num_paths: Count = Field(
        default=defaults.SPECTR_NUM_PATHS,
        le=MAX_DRAFTS,
        description="independent paths",
    )
    depth: Count = Field(
        default=defaults.SPECTR_DEPTH,
        le=MAX_DRAFTS,
        description="draft tokens of each path",
    )
    scorer: Literal["k_seq", "multi_round"] = Field(
        default="k_seq", description="verification rule"
    )

    @property
    def rule(self) -> str:
        """The rule that the spec-config names."""
        return self.scorer

    def smaller_shapes(self) -> list[tuple[dict[str, Any], int]]:
        """One level of four draft tokens, then of two."""
        return [
            ({"num_paths": min(4, self.num_paths), "depth": 1}, 1),
            ({"num_paths": min(2, self.num_paths), "depth": 1}, 2),
        ]


class SpecInferDraft(BaseModel):
    """One draft model of SpecInfer and the tree that it draws."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: str = Field(min_length=1, description="folder or hub id of the draft model")
    branching_factors: tuple[Count, ...] = Field(
        default=defaults.SPECINFER_BRANCHING_FACTORS,
        min_length=1,
        max_length=MAX_DRAFTS,
        description="draws per node, by level",
    )


class SpecInferConfig(MethodConfig):
    """Trees of one or more draft models, merged."""

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
    def rule(self) -> str:
        """Several draft distributions at one node need multi-round rejection."""
        return "multi_round"

    @property
    def shape(self) -> dict[str, Any]:
        """The draft models' trees."""
        return {"branching_factors": tuple(d.branching_factors for d in self.drafts)}

    def with_shape(self, shape: Mapping[str, Any]) -> Self:
        """Make a spec-config with other trees of the same draft models."""
        changed = super().with_shape(shape)
        if changed.models != self.models:
            raise ValueError(
                f"'schedule' has an entry with draft models {list(changed.models)}; "
                f"write {list(self.models)}, only the branching factors may differ"
            )
        return changed


class SuffixTreeConfig(MethodConfig):
    """What followed earlier occurrences of the last tokens; no draft model."""

    SHAPE = ("num_drafts", "depth")

    method: Literal["suffix_tree"]
    num_drafts: Count = Field(
        default=defaults.SUFFIX_NUM_DRAFTS,
        le=MAX_DRAFTS,
        description="draft tokens at most",
    )
    depth: Count = Field(
        default=defaults.SUFFIX_DEPTH,
        le=MAX_DRAFTS,
        description="levels below the root",
    )
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
    def rule(self) -> str:
        """Drafts that were not drawn have no distribution to reject by."""
        return "target_draw"

    def smaller_shapes(self) -> list[tuple[dict[str, Any], int]]:
        """Four draft tokens, then two."""
        return [
            ({"num_drafts": min(4, self.num_drafts)}, 2),
            ({"num_drafts": min(2, self.num_drafts)}, 4),
        ]

    def proposer(self) -> Proposer:
        """Make the proposer, with an empty cache."""
        return Suffix(
            **self.shape,
            max_match=self.max_match,
            max_cached_tokens=self.max_cached_tokens,
        )


class ReDrafterConfig(HeadMethodConfig):
    """Beam search over a recurrent head."""

    SHAPE = ("beam_width", "length", "num_drafts")
    HEAD = "redrafter"

    method: Literal["redrafter"]
    beam_width: Count = Field(
        default=defaults.REDRAFTER_BEAM_WIDTH, le=MAX_DRAFTS, description="beams"
    )
    length: Count = Field(
        default=defaults.REDRAFTER_LENGTH,
        le=MAX_DRAFTS,
        description="draft tokens of each beam",
    )
    beam_search: Literal["deterministic", "stochastic"] = Field(
        default="deterministic",
        description="stochastic: beams are drawn; they are verified by recursive "
        "rejection, which uses the head's probabilities",
    )
    num_drafts: Count | None = Field(
        default=None,
        validate_default=True,
        le=MAX_DRAFTS,
        description="draft tokens at most, the likeliest are kept; null: "
        f"{defaults.REDRAFTER_NUM_DRAFTS}, and all of a stochastic beam",
    )

    @property
    def rule(self) -> str:
        """Drawn beams have a distribution to reject by, the others have none."""
        if self.beam_search == "stochastic":
            return "recursive_rejection"
        return super().rule

    def proposer(self) -> Proposer:
        """Make the proposer of this kind of beam search."""
        if self.beam_search == "stochastic":
            return RsdS(self.beam_width, self.length)
        return super().proposer()

    def smaller_shapes(self) -> list[tuple[dict[str, Any], int]]:
        """Two levels of five draft tokens, then one of four, then of two."""
        smaller = (((4, 2, 5), 1), ((4, 1, 4), 2), ((2, 1, 2), 4))
        shapes = []
        for (beam_width, length, num_drafts), batch_size in smaller:
            shape = {
                "beam_width": min(beam_width, self.beam_width),
                "length": min(length, self.length),
            }
            if self.num_drafts is not None:
                shape["num_drafts"] = min(num_drafts, self.num_drafts)
            shapes.append((shape, batch_size))
        return shapes

    def drafting_cost(self, depth: int) -> float:
        """One pass of the head a level."""
        return 0.06 * depth

    @field_validator("num_drafts")
    @classmethod
    def _drawn_beams_are_kept(
        cls, num_drafts: int | None, info: ValidationInfo
    ) -> int | None:
        if info.data.get("beam_search") != "stochastic":
            return num_drafts or defaults.REDRAFTER_NUM_DRAFTS
        if num_drafts is not None:
            raise ValueError(
                "a stochastic beam keeps all beam_width x length draft tokens; remove "
                "'num_drafts', or write 'beam_search' 'deterministic'"
            )
        return None


class MedusaTreeConfig(HeadMethodConfig):
    """A tree of fixed shape, filled by one head a level."""

    SHAPE = ("num_drafts",)
    HEAD = "medusa"

    method: Literal["medusa_tree"]
    num_drafts: Count = Field(
        default=defaults.MEDUSA_NUM_DRAFTS, le=MAX_DRAFTS, description="draft tokens"
    )

    def proposer(self) -> Proposer:
        """Make the proposer, with the tree that suits the head's accuracies."""
        head = read_head_config(Path(self.model))
        assert isinstance(head, MedusaHeadConfig)
        ranks = {"rank_accuracies": head.rank_accuracies}
        return PROPOSERS[self.name](**self.shape, **ranks)

    def smaller_shapes(self) -> list[tuple[dict[str, Any], int]]:
        """Four draft tokens, then two."""
        return [
            ({"num_drafts": min(num_drafts, self.num_drafts)}, batch_size)
            for num_drafts, batch_size in ((4, 2), (2, 4))
        ]

    def drafting_cost(self, depth: int) -> float:
        """All levels at once."""
        return 0.06

    @field_validator("model")
    @classmethod
    def _heads_reach(cls, model: str) -> str:
        head = read_head_config(Path(model))
        assert isinstance(head, MedusaHeadConfig)
        levels = len(head.rank_accuracies)
        if levels > head.depth:
            raise ValueError(
                f"'rank_accuracies' in {model}/config.json has {levels} levels and "
                f"there are {head.depth} heads; remove the last levels"
            )
        return model


METHODS: dict[str, type[MethodConfig]] = {
    "sd": SdConfig,
    "rsd_c": RsdCConfig,
    "rsd_s": RsdSConfig,
    "spectr": SpecTrConfig,
    "specinfer": SpecInferConfig,
    "suffix_tree": SuffixTreeConfig,
    "redrafter": ReDrafterConfig,
    "medusa_tree": MedusaTreeConfig,
}
