"""The spec-config users write: one validated type per method."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeInt,
    PositiveInt,
    TypeAdapter,
    ValidationError,
)

from vllm_treespec.method_config import MAX_DRAFTS, DraftModelConfig, MethodConfig
from vllm_treespec.proposers import Proposer, Suffix


class SpecConfigError(ValueError):
    """A spec-config that cannot work; the message names the key and the remedy."""


class SdConfig(DraftModelConfig):
    """A chain of draft tokens: ordinary speculative decoding."""

    SHAPE = ("depth",)

    method: Literal["sd"]
    depth: PositiveInt = Field(le=MAX_DRAFTS, description="draft tokens")

    def smaller_shapes(self) -> list[tuple[dict[str, Any], int]]:
        """One draft token."""
        return [({"depth": 1}, 2)]


class RsdCConfig(DraftModelConfig):
    """A tree with constant branching factors."""

    SHAPE = ("branching_factors",)

    method: Literal["rsd_c"]
    branching_factors: tuple[PositiveInt, ...] = Field(
        min_length=1, max_length=MAX_DRAFTS, description="children per node, by level"
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
    beam_width: PositiveInt = Field(le=MAX_DRAFTS, description="nodes per level")
    depth: PositiveInt = Field(le=MAX_DRAFTS, description="levels below the root")

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
    num_paths: PositiveInt = Field(le=MAX_DRAFTS, description="independent paths")
    depth: PositiveInt = Field(le=MAX_DRAFTS, description="draft tokens of each path")
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
    branching_factors: tuple[PositiveInt, ...] = Field(
        min_length=1, max_length=MAX_DRAFTS, description="draws per node, by level"
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


class SuffixConfig(MethodConfig):
    """What followed earlier occurrences of the last tokens; no draft model."""

    SHAPE = ("num_drafts", "depth")

    method: Literal["suffix"]
    num_drafts: PositiveInt = Field(le=MAX_DRAFTS, description="draft tokens at most")
    depth: PositiveInt = Field(le=MAX_DRAFTS, description="levels below the root")
    max_match: PositiveInt = Field(
        default=16, le=256, description="last tokens to look up at most"
    )
    max_cached_tokens: NonNegativeInt = Field(
        default=2**16, le=2**20, description="of earlier requests' outputs"
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


SpecConfig = (
    SdConfig | RsdCConfig | RsdSConfig | SpecTrConfig | SpecInferConfig | SuffixConfig
)
METHODS: dict[str, type[MethodConfig]] = {
    "sd": SdConfig,
    "rsd_c": RsdCConfig,
    "rsd_s": RsdSConfig,
    "spectr": SpecTrConfig,
    "specinfer": SpecInferConfig,
    "suffix": SuffixConfig,
}
_ADAPTER: TypeAdapter[SpecConfig] = TypeAdapter(
    Annotated[SpecConfig, Field(discriminator="method")]
)


def parse_spec_config(spec: Mapping[str, Any]) -> MethodConfig:
    """Validate a spec-config.

    Raises:
        SpecConfigError: one message that names each wrong key and the remedy.

    """
    try:
        return _ADAPTER.validate_python(dict(spec))
    except ValidationError as error:
        known = METHODS.get(str(spec.get("method")))
        raise SpecConfigError(_one_message(error, spec, known)) from None


def _one_message(
    error: ValidationError,
    spec: Mapping[str, Any],
    known: type[MethodConfig] | None,
) -> str:
    if known is None:
        return (
            f"speculative_config: 'method' is {spec.get('method')!r}; "
            f"write one of {', '.join(METHODS)}"
        )
    keys = ", ".join(known.model_fields)
    problems = []
    for problem in error.errors():
        parts = [str(part) for part in problem["loc"][1:]]
        # pydantic names the members of a union, too
        key = ".".join(part for part in parts if "[" not in part)
        if problem["type"] == "extra_forbidden":
            problems.append(f"'{key}' is not a key of this method; remove it")
        elif problem["type"] == "missing":
            problems.append(f"'{key}' is missing; add it")
        elif key:
            problems.append(f"'{key}' is {problem['input']!r}: {problem['msg']}")
        else:
            problems.append(str(problem["msg"]).removeprefix("Value error, "))
    return (
        f"speculative_config for method '{spec['method']}': {'; '.join(problems)} "
        f"(its keys are {keys})"
    )
