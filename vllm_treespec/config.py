"""The spec-config users write: one validated type per method."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PositiveInt,
    TypeAdapter,
    ValidationError,
    model_validator,
)

from vllm_treespec.proposers import PROPOSERS, Proposer
from vllm_treespec.tree import MAX_NODES

MAX_DRAFTS = MAX_NODES - 1


class SpecConfigError(ValueError):
    """A spec-config that cannot work; the message names the key and the remedy."""


class DraftModelConfig(BaseModel):
    """What all methods with a draft model share."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=False)

    model: str = Field(min_length=1, description="folder or hub id of the draft model")
    max_trees: PositiveInt = Field(
        default=16, description="requests that may carry a tree in one step"
    )

    def proposer(self) -> Proposer:
        """Make the proposer that this spec-config describes."""
        shape = self.model_dump(exclude={"method", "model", "max_trees"})
        return PROPOSERS[self.method](**shape)  # type: ignore[attr-defined]

    @model_validator(mode="after")
    def _tree_fits(self) -> DraftModelConfig:
        num_drafts = self.proposer().max_nodes - 1
        if num_drafts > MAX_DRAFTS:
            keys = ", ".join(self.model_dump(exclude={"method", "model", "max_trees"}))
            raise ValueError(
                f"the tree has {num_drafts} draft tokens and at most {MAX_DRAFTS} fit; "
                f"lower {keys}"
            )
        return self


class SdConfig(DraftModelConfig):
    """A chain of draft tokens: ordinary speculative decoding."""

    method: Literal["sd"]
    depth: PositiveInt = Field(le=MAX_DRAFTS, description="draft tokens")


class RsdCConfig(DraftModelConfig):
    """A tree with constant branching factors."""

    method: Literal["rsd_c"]
    branching_factors: tuple[PositiveInt, ...] = Field(
        min_length=1, max_length=MAX_DRAFTS, description="children per node, by level"
    )


class RsdSConfig(DraftModelConfig):
    """A tree drawn by stochastic beam search."""

    method: Literal["rsd_s"]
    beam_width: PositiveInt = Field(le=MAX_DRAFTS, description="nodes per level")
    depth: PositiveInt = Field(le=MAX_DRAFTS, description="levels below the root")


SpecConfig = SdConfig | RsdCConfig | RsdSConfig
METHODS: dict[str, type[DraftModelConfig]] = {
    "sd": SdConfig,
    "rsd_c": RsdCConfig,
    "rsd_s": RsdSConfig,
}
_ADAPTER: TypeAdapter[SpecConfig] = TypeAdapter(
    Annotated[SpecConfig, Field(discriminator="method")]
)


def parse_spec_config(spec: Mapping[str, Any]) -> SpecConfig:
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
    known: type[DraftModelConfig] | None,
) -> str:
    if known is None:
        return (
            f"speculative_config: 'method' is {spec.get('method')!r}; "
            f"write one of {', '.join(METHODS)}"
        )
    keys = ", ".join(known.model_fields)
    problems = []
    for problem in error.errors():
        key = ".".join(str(part) for part in problem["loc"][1:])
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
