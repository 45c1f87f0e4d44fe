"""The spec-config users write: one validated type per method."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from math import prod
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeInt,
    PositiveInt,
    TypeAdapter,
    ValidationError,
    ValidationInfo,
    field_validator,
)

from vllm_treespec.heads import MedusaHeadConfig, read_head_config
from vllm_treespec.method_config import (
    MAX_DRAFTS,
    DraftModelConfig,
    HeadMethodConfig,
    MethodConfig,
)
from vllm_treespec.proposers import PROPOSERS, Proposer, RsdS, Suffix

# Draft tokens of ReDrafter's tree unless the user says more.
HEAD_DRAFTS = 15


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


class SuffixTreeConfig(MethodConfig):
    """What followed earlier occurrences of the last tokens; no draft model."""

    SHAPE = ("num_drafts", "depth")

    method: Literal["suffix_tree"]
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


class ReDrafterConfig(HeadMethodConfig):
    """Beam search over a recurrent head."""

    SHAPE = ("beam_width", "length", "num_drafts")
    HEAD = "redrafter"

    method: Literal["redrafter"]
    beam_width: PositiveInt = Field(default=4, le=MAX_DRAFTS, description="beams")
    length: PositiveInt = Field(
        default=2, le=MAX_DRAFTS, description="draft tokens of each beam"
    )
    num_drafts: PositiveInt | None = Field(
        default=None,
        le=MAX_DRAFTS,
        description="draft tokens at most, the likeliest are kept; null: "
        f"{HEAD_DRAFTS}; a stochastic beam keeps all",
    )
    beam_search: Literal["deterministic", "stochastic"] = Field(
        default="deterministic",
        description="stochastic: beams are drawn; they are verified by recursive "
        "rejection, which uses the head's probabilities",
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
        return PROPOSERS[self.name](**{"num_drafts": HEAD_DRAFTS, **self.shape})

    def smaller_shapes(self) -> list[tuple[dict[str, Any], int]]:
        """Two levels of five draft tokens, then one of four, then of two."""
        smaller = (((4, 2, 5), 1), ((4, 1, 4), 2), ((2, 1, 2), 4))
        shapes = []
        for (beam_width, length, num_drafts), batch_size in smaller:
            shape = {
                "beam_width": min(beam_width, self.beam_width),
                "length": min(length, self.length),
            }
            if self.beam_search == "deterministic":
                shape["num_drafts"] = min(num_drafts, self.num_drafts or HEAD_DRAFTS)
            shapes.append((shape, batch_size))
        return shapes

    def drafting_cost(self, depth: int) -> float:
        """One pass of the head a level."""
        return 0.06 * depth

    @field_validator("beam_search")
    @classmethod
    def _drawn_beams_are_kept(cls, beam_search: str, info: ValidationInfo) -> str:
        if beam_search == "stochastic" and info.data.get("num_drafts") is not None:
            raise ValueError(
                "this keeps all beam_width x length draft tokens; remove 'num_drafts', "
                "or write 'deterministic'"
            )
        return beam_search


class MedusaTreeConfig(HeadMethodConfig):
    """A tree of fixed shape, filled by one head a level."""

    SHAPE = ("num_drafts",)
    HEAD = "medusa"

    method: Literal["medusa_tree"]
    num_drafts: PositiveInt = Field(
        default=5, le=MAX_DRAFTS, description="draft tokens"
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


SpecConfig = (
    SdConfig
    | RsdCConfig
    | RsdSConfig
    | SpecTrConfig
    | SpecInferConfig
    | SuffixTreeConfig
    | ReDrafterConfig
    | MedusaTreeConfig
)
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
# Methods that got another name, because the old one is a method of vLLM's own.
RENAMED = {"suffix": "suffix_tree", "medusa": "medusa_tree"}
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
        if known is None:
            raise unknown_method(spec) from None
        raise SpecConfigError(_one_message(error, spec, known)) from None


def unknown_method(spec: Mapping[str, Any]) -> SpecConfigError:
    """Say that a spec-config names none of our methods, and which one may be meant."""
    names = ", ".join(METHODS)
    if "method" not in spec:
        fitting = [
            n for n, m in METHODS.items() if spec.keys() <= m.model_fields.keys()
        ]
        return SpecConfigError(
            f"speculative_config: 'method' is missing; "
            f"write one of {', '.join(fitting) or names}"
        )
    method = spec["method"]
    message = f"speculative_config: 'method' is {method!r}"
    if not isinstance(method, str):
        return SpecConfigError(f"{message}; write a name, one of {names}")
    if method in RENAMED:
        return SpecConfigError(
            f"{message}, which is a method of vLLM's own and does not take these keys; "
            f"the method of draft trees is '{RENAMED[method]}'"
        )
    like = method.lower().replace("-", "_")
    nearest = get_close_matches(like, METHODS, n=1)
    meant = f" (did you mean '{nearest[0]}'?)" if nearest else ""
    return SpecConfigError(
        f"{message}{meant}; write one of {names}, or a method of vLLM's own"
    )


def _one_message(
    error: ValidationError, spec: Mapping[str, Any], known: type[MethodConfig]
) -> str:
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
        else:
            message = str(problem["msg"]).removeprefix("Value error, ")
            key = f"'{key}' is {problem['input']!r}: " if key else ""
            problems.append(key + message)
    return (
        f"speculative_config for method '{spec['method']}': {'; '.join(problems)} "
        f"(its keys are {keys})"
    )
