"""What the spec-configs of all methods share: schedule, draft models, trees."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self, get_args

from pydantic import (
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    ValidationError,
    model_validator,
)

from vllm_treespec.proposers import Proposer
from vllm_treespec.schedule.plan import MAX_SLOWDOWN
from vllm_treespec.scorers.base import Rule
from vllm_treespec.scorers.recursive_rejection import RECURSIVE_REJECTION
from vllm_treespec.sources.base import TextSource
from vllm_treespec.trees.sizes import TreeSizes
from vllm_treespec.trees.source import Source
from vllm_treespec.trees.tree import MAX_NODES

MAX_DRAFTS = MAX_NODES - 1
NO_LIMIT = 2**31
# true and 3.0 are no numbers of tokens
Count = Annotated[int, Field(strict=True, gt=0)]
DraftCount = Annotated[Count, Field(le=MAX_DRAFTS)]
Number = Annotated[float, Field(strict=True, allow_inf_nan=False)]
MinProbability = Annotated[
    Number,
    Field(ge=0, lt=1, description="leave out drafts that are less likely accepted"),
]


class SpecConfigError(ValueError):
    """A spec-config that cannot work; the message names the key and the remedy."""


class TypicalAcceptanceConfig(BaseModel):
    """Typical acceptance: faster, and *not* the target's distribution."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    epsilon: Number = Field(gt=0, lt=1, description="highest acceptance threshold")
    delta: Number = Field(gt=0, description="threshold times exp(-entropy)")


class ScheduleEntry(BaseModel):
    """A tree for steps of up to ``batch_size`` requests.

    Besides the keys here it takes those that shape the method's tree; without them
    it stands for the tree of the spec-config itself.
    """

    model_config = ConfigDict(extra="allow", frozen=True)

    batch_size: Count = Field(description="most running requests in a step")
    min_acceptance_length: Number = Field(
        default=1.0, ge=1.0, description="give this tree up when less is measured"
    )

    @property
    def shape(self) -> dict[str, Any]:
        """The keys that shape the tree."""
        return dict(self.model_extra or {})


class MethodConfig(BaseModel, ABC):
    """What all methods share; each has a key ``method``, a Literal of its name.

    To make one reads no file: models and heads are checked by ``config.checks``.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=False)

    # what a user must have besides the target
    NEEDS: ClassVar[str] = "nothing"
    # keys that shape the tree, and may stand in a schedule
    SHAPE: ClassVar[tuple[str, ...]] = ()
    # those of children per node and of levels, if what drafts keeps KV of its nodes
    READ_SHAPE: ClassVar[tuple[str, ...]] = ()

    max_trees: Count = Field(
        default=16, description="requests that may carry a tree in one step"
    )
    schedule: Annotated[
        Annotated[tuple[ScheduleEntry, ...], Tag("[entries]")]
        | Annotated[Literal["measured", "fixed"], Tag("[name]")],
        Discriminator(
            lambda given: "[name]" if isinstance(given, str) else "[entries]"
        ),
    ] = Field(
        default="measured",
        description="measured: the tree, or none, that brings most tokens a second; "
        "fixed: always the same; or a list of trees by batch size",
    )
    schedule_cache: bool = Field(
        default=True,
        description="keep what the measured schedule learned for the next start",
    )
    max_slowdown: Annotated[Number, Field(gt=1.0)] | None = Field(
        default=None,
        description="times a plain step that a step with trees may take, in the "
        f"measured schedule (default: {MAX_SLOWDOWN:g}); the less, the more evenly "
        "answers flow",
    )
    lossy_typical_acceptance: TypicalAcceptanceConfig | None = Field(
        default=None,
        description="give up the target's distribution for speed",
        examples=[{"epsilon": 0.09, "delta": 0.3}],
    )

    @classmethod
    def method_name(cls) -> str:
        """The name that users write as ``method``."""
        (name,) = get_args(cls.model_fields["method"].annotation)
        return str(name)

    @property
    def name(self) -> str:
        """The method's name."""
        return self.method_name()

    @property
    def models(self) -> tuple[str, ...]:
        """Folders or hub ids of the draft models, in the proposer's order."""
        return ()

    @property
    def hot_token_files(self) -> tuple[Path | None, ...]:
        """For each draft model the JSON file of the tokens it drafts; None: all."""
        return (None,) * len(self.models)

    @property
    def head(self) -> str | None:
        """Folder or hub id of the head that drafts from the target's hidden states."""
        return None

    @property
    def head_kind(self) -> str | None:
        """The kind of that head."""
        return None

    @property
    def needs_one_group(self) -> bool:
        """Whether all layers must be in one KV cache group: what drafts keeps KV.

        For the exception see ``checks.head_joins_groups``.
        """
        return bool(self.models) or self.head_kind in ("eagle", "lyanna", "dflash")

    @property
    def prunes_by_cost(self) -> bool:
        """Whether its trees leave out drafts that are worth less than their row."""
        return False

    @property
    def sources(self) -> Source:
        """What drafts its trees: its models or head, and an index if it makes one."""
        has_model = bool(self.models) or self.head is not None
        has_index = type(self).text_source is not MethodConfig.text_source
        sources = Source.MODEL if has_model else Source(0)
        return sources | Source.INDEX if has_index else sources

    @property
    def rule(self) -> Rule:
        """The verification rule for sampled requests."""
        return RECURSIVE_REJECTION

    @property
    def shape(self) -> dict[str, Any]:
        """The keys that shape the tree, without those that are null."""
        shape = self.model_dump(include=set(self.SHAPE), exclude_none=True)
        return {key: shape[key] for key in self.SHAPE if key in shape}

    @property
    def shape_name(self) -> str:
        """The shape in short: ``3x2``."""
        return self._short_shape(self.SHAPE)

    def _short_shape(self, keys: Sequence[str]) -> str:
        """The shape in short, of these keys."""
        shape = self.shape
        return "x".join(_short(shape[key]) for key in keys if key in shape)

    @property
    @abstractmethod
    def sizes(self) -> TreeSizes:
        """How large its trees become: bounds that follow from its keys alone."""

    @abstractmethod
    def proposer(self) -> Proposer:
        """Make the proposer that this spec-config describes."""

    def text_source(self) -> TextSource | None:
        """Make what the method drafts from earlier text with, such as a suffix index.

        Its ``look_up`` returns ``Continuations``. None: the method has none.
        """
        return None

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
        fixed = {"schedule": "fixed", "max_slowdown": None}
        if not shape:
            return self.model_copy(update=fixed)
        changed = {**self.model_dump(), **fixed, **shape}
        try:
            return type(self).model_validate(changed)
        except ValidationError as error:
            problem = error.errors()[0]
            where = ".".join(str(part) for part in problem["loc"]) or "the tree"
            raise ValueError(
                f"'schedule' has an entry in which {where} is wrong: {problem['msg']}"
            ) from None

    def scheduled_trees(self) -> list[ScheduledTree]:
        """Every tree of the schedule with its limits, in the schedule's order."""
        if self.schedule == "fixed":
            return [ScheduledTree(self, NO_LIMIT, 1.0)]
        if isinstance(self.schedule, tuple):
            return [
                ScheduledTree(
                    self.with_shape(entry.shape),
                    entry.batch_size,
                    entry.min_acceptance_length,
                )
                for entry in self.schedule
            ]
        trees: list[MethodConfig] = []
        for shape in ({}, *self.smaller_shapes()):
            tree = self.with_shape(shape)
            if tree not in trees:
                trees.append(tree)
        return [ScheduledTree(tree, NO_LIMIT, 1.0) for tree in trees]

    def smaller_shapes(self) -> list[dict[str, Any]]:
        """Smaller trees that a measured schedule tries, from large to small."""
        return []

    @model_validator(mode="after")
    def _tree_fits(self) -> Self:
        num_drafts = self.sizes.max_nodes - 1
        if num_drafts > MAX_DRAFTS:
            raise ValueError(
                f"the tree has {num_drafts} draft tokens and at most {MAX_DRAFTS} fit; "
                f"lower {', '.join(k for k in self.SHAPE if k != 'min_probability')}"
            )
        num_read = self.sizes.draft_nodes
        if self.READ_SHAPE and num_read > MAX_DRAFTS:
            width, depth = self.READ_SHAPE
            raise ValueError(
                f"the model reads {num_read} nodes of a tree, {width} x ({depth} - 1), "
                f"and at most {MAX_DRAFTS} fit; lower '{width}' or '{depth}'"
            )
        if self.schedule == ():
            raise ValueError("'schedule' is empty; remove it, or write 'fixed'")
        if self.max_slowdown is not None and self.schedule != "measured":
            raise ValueError(
                "'max_slowdown' is for the measured schedule, which knows what steps "
                "take; remove it, or 'schedule'"
            )
        self.scheduled_trees()
        return self


@dataclass(frozen=True)
class ScheduledTree:
    """One tree of a schedule; implements ``schedule.base.ScheduledTree``."""

    config: MethodConfig
    # most running requests in a step
    batch_size: int
    min_acceptance_length: float

    @cached_property
    def name(self) -> str:
        """Method and shape, for metrics: ``rsd_s 3x2``, ``rsd_c 3.2.1``."""
        return f"{self.config.name} {self.config.shape_name}"

    @cached_property
    def sizes(self) -> TreeSizes:
        """How large it becomes."""
        return self.config.sizes

    @property
    def prunes_by_cost(self) -> bool:
        """Whether its proposer leaves out drafts that are worth less than their row."""
        return self.config.prunes_by_cost

    @cached_property
    def sources(self) -> Source:
        """What drafts it."""
        return self.config.sources

    def has_shape(self, shape: Mapping[str, object]) -> bool:
        """Whether this is the tree that ``shape`` makes of its spec-config.

        Raises:
            ValueError: when a key does not shape this method's tree.

        """
        return self.config == self.config.with_shape(shape)


def _short(value: Any) -> str:
    """A number, or branching factors of one or several draft models."""
    if not isinstance(value, tuple):
        return str(value)
    separator = "+" if isinstance(value[0], tuple) else "."
    return separator.join(_short(part) for part in value)


class DraftModelsConfig(MethodConfig):
    """What all methods with draft models share."""

    hot_tokens: str | None = Field(
        default=None,
        min_length=1,
        description="JSON file of the token ids to draft; left out: hot_tokens.json in "
        "the draft model's folder, if there (in every one's, and equal, if there are "
        "several); all: every token",
    )

    @property
    def hot_token_files(self) -> tuple[Path | None, ...]:
        """For each draft model the JSON file of the tokens it drafts; None: all.

        One tree draws from one draft vocabulary: files of the models' own are for
        nothing unless they are equal.
        """
        if self.hot_tokens is not None:
            file = None if self.hot_tokens == "all" else Path(self.hot_tokens)
            return (file,) * len(self.models)
        own = [Path(model) / "hot_tokens.json" for model in self.models]
        if all(file.is_file() for file in own) and (
            len({file.read_bytes() for file in own}) == 1
        ):
            return tuple(own)
        return (None,) * len(own)


class DraftModelConfig(DraftModelsConfig):
    """What all methods with one draft model share."""

    NEEDS = "a draft model"

    model: str = Field(min_length=1, description="folder or hub id of the draft model")

    @property
    def models(self) -> tuple[str, ...]:
        """The one draft model."""
        return (self.model,)


class FilteredTreeConfig(DraftModelConfig):
    """What methods share that leave out drawn tokens which are not likely enough."""

    min_probability: MinProbability | None = None

    @property
    def prunes_by_cost(self) -> bool:
        """Yes: likely drafts alone, and levels that are worth reading."""
        return True
