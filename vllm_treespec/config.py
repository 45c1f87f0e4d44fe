"""The spec-config users write: one validated type per method."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeInt,
    PositiveInt,
    TypeAdapter,
    ValidationError,
    model_validator,
)

from vllm_treespec.proposers import PROPOSERS, Proposer, Suffix
from vllm_treespec.tree import MAX_NODES

MAX_DRAFTS = MAX_NODES - 1
NO_LIMIT = 2**31


class SpecConfigError(ValueError):
    """A spec-config that cannot work; the message names the key and the remedy."""


class TypicalAcceptanceConfig(BaseModel):
    """Typical acceptance: faster, and *not* the target's distribution."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    epsilon: float = Field(gt=0, lt=1, description="highest acceptance threshold")
    delta: float = Field(gt=0, description="threshold times exp(-entropy)")


class ScheduleEntry(BaseModel):
    """A tree for steps of up to ``batch_size`` requests.

    Besides the keys here it takes those that shape the method's tree; without them
    it stands for the tree of the spec-config itself.
    """

    model_config = ConfigDict(extra="allow", frozen=True)

    batch_size: PositiveInt = Field(description="most running requests in a step")
    min_acceptance_length: float = Field(
        default=1.0, ge=1.0, description="give this tree up when less is measured"
    )

    @property
    def shape(self) -> dict[str, Any]:
        """The keys that shape the tree."""
        return dict(self.model_extra or {})


class MethodConfig(BaseModel):
    """What all methods share."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=False)

    # keys that shape the tree, and may stand in a schedule
    SHAPE: ClassVar[tuple[str, ...]] = ()

    max_trees: PositiveInt = Field(
        default=16, description="requests that may carry a tree in one step"
    )
    schedule: tuple[ScheduleEntry, ...] | Literal["default", "fixed"] = Field(
        default="default", description="trees by batch size; fixed: always the same"
    )
    lossy_typical_acceptance: TypicalAcceptanceConfig | None = Field(
        default=None, description="give up the target's distribution for speed"
    )

    @property
    def name(self) -> str:
        """The method's name."""
        return str(self.model_dump()["method"])

    @property
    def models(self) -> tuple[str, ...]:
        """Folders or hub ids of the draft models, in the proposer's order."""
        return ()

    @property
    def rule(self) -> str:
        """Name of the verification rule for sampled requests."""
        return "recursive_rejection"

    @property
    def shape(self) -> dict[str, Any]:
        """The keys that shape the tree."""
        return self.model_dump(include=set(self.SHAPE))

    def proposer(self) -> Proposer:
        """Make the proposer that this spec-config describes."""
        return PROPOSERS[self.name](**self.shape)

    def with_shape(self, shape: Mapping[str, Any]) -> Self:
        """Make a spec-config of this method with another tree, used at any batch size.

        Raises:
            ValueError: when a key does not shape this method's tree.

        """
        for key in shape:
            if key not in self.SHAPE:
                raise ValueError(
                    f"'schedule' has an entry with '{key}', which does not shape a "
                    f"{self.name} tree; write {', '.join(self.SHAPE) or 'no such key'}"
                )
        changed = {**self.model_dump(), "schedule": "fixed", **shape}
        try:
            return type(self).model_validate(changed)
        except ValidationError as error:
            problem = error.errors()[0]
            where = ".".join(str(part) for part in problem["loc"]) or "the tree"
            raise ValueError(
                f"'schedule' has an entry in which {where} is wrong: {problem['msg']}"
            ) from None

    def scheduled(self) -> list[ScheduledTree]:
        """Every tree of the schedule with its limits, in the schedule's order."""
        if self.schedule == "fixed":
            return [ScheduledTree(self, NO_LIMIT, 1.0)]
        entries = self.schedule
        if not isinstance(entries, tuple):
            entries = default_schedule(self)
        return [
            ScheduledTree(
                self.with_shape(entry.shape),
                entry.batch_size,
                entry.min_acceptance_length,
            )
            for entry in entries
        ]

    @model_validator(mode="after")
    def _tree_fits(self) -> MethodConfig:
        num_drafts = self.proposer().max_nodes - 1
        if num_drafts > MAX_DRAFTS:
            raise ValueError(
                f"the tree has {num_drafts} draft tokens and at most {MAX_DRAFTS} fit; "
                f"lower {', '.join(self.SHAPE)}"
            )
        if self.schedule == ():
            raise ValueError("'schedule' is empty; remove it, or write 'fixed'")
        self.scheduled()
        return self


@dataclass(frozen=True)
class ScheduledTree:
    """One tree of a schedule."""

    config: MethodConfig
    # most running requests in a step
    batch_size: int
    min_acceptance_length: float

    @property
    def name(self) -> str:
        """Method and shape, for metrics: ``rsd_s 3x2``, ``rsd_c 3.2.1``."""
        shape = "x".join(_short(value) for value in self.config.shape.values())
        return f"{self.config.name} {shape}"


def _short(value: Any) -> str:
    """A number, or branching factors of one or several draft models."""
    if not isinstance(value, tuple):
        return str(value)
    separator = "+" if isinstance(value[0], tuple) else "."
    return separator.join(_short(part) for part in value)


class DraftModelConfig(MethodConfig):
    """What all methods with one draft model share."""

    model: str = Field(min_length=1, description="folder or hub id of the draft model")

    @property
    def models(self) -> tuple[str, ...]:
        """The one draft model."""
        return (self.model,)


class SdConfig(DraftModelConfig):
    """A chain of draft tokens: ordinary speculative decoding."""

    SHAPE = ("depth",)

    method: Literal["sd"]
    depth: PositiveInt = Field(le=MAX_DRAFTS, description="draft tokens")


class RsdCConfig(DraftModelConfig):
    """A tree with constant branching factors."""

    SHAPE = ("branching_factors",)

    method: Literal["rsd_c"]
    branching_factors: tuple[PositiveInt, ...] = Field(
        min_length=1, max_length=MAX_DRAFTS, description="children per node, by level"
    )


class RsdSConfig(DraftModelConfig):
    """A tree drawn by stochastic beam search."""

    SHAPE = ("beam_width", "depth")

    method: Literal["rsd_s"]
    beam_width: PositiveInt = Field(le=MAX_DRAFTS, description="nodes per level")
    depth: PositiveInt = Field(le=MAX_DRAFTS, description="levels below the root")


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


def default_schedule(config: MethodConfig) -> tuple[ScheduleEntry, ...]:
    """The schedule of a spec-config that gives none: its tree up to a batch of two.

    Measured on two CPU cores with a 135M target (docs/adaptive.md).
    """
    return (ScheduleEntry(batch_size=2, min_acceptance_length=1.3),)


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
