"""What the spec-configs of all methods share that draft with a head."""

from __future__ import annotations

from abc import abstractmethod
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Field, ValidationInfo, field_validator

from vllm_treespec.config.base import DraftCount, MethodConfig, MinProbability
from vllm_treespec.proposers import (
    DynamicTree,
    RsdS,
    StochasticTree,
    dynamic_tree,
    rsd_s,
    stochastic_tree,
)
from vllm_treespec.scorers.base import Rule
from vllm_treespec.scorers.coupled_draw import COUPLED_DRAW
from vllm_treespec.scorers.recursive_rejection import RECURSIVE_REJECTION
from vllm_treespec.trees.sizes import TreeSizes

# Smaller trees: children per node, levels, draft tokens.
SMALLER = ((4, 3, 8), (4, 2, 5), (4, 1, 4), (2, 1, 2))
# Enough where a tree's drafts and levels are weighed.
ONE_LEVEL = ((4, 1, 4),)


class HeadMethodConfig(MethodConfig):
    """What all methods share that draft from the target's hidden state."""

    # the kind of head
    HEAD: ClassVar[str]

    model: str = Field(min_length=1, description="folder or hub id of the head")

    @property
    def head(self) -> str:
        """The folder or hub id of the head."""
        return self.model

    @property
    def head_kind(self) -> str:
        """The kind of the head."""
        return self.HEAD

    @property
    def rule(self) -> Rule:
        """Drafts that were not drawn have no distribution to reject by."""
        return COUPLED_DRAW


def _for_dynamic_trees(least: float | None, info: ValidationInfo) -> float | None:
    """Refuse a ``min_probability`` of a tree that is not a dynamic one."""
    if least is not None and info.data.get("tree") != "dynamic":
        raise ValueError(
            "only a dynamic tree leaves drafts out; remove it, or write 'tree' "
            "'dynamic'"
        )
    return least


DynamicMinProbability = Annotated[
    MinProbability | None, AfterValidator(_for_dynamic_trees)
]
# Of trees that their heads grow.
GrownTree = Annotated[
    Literal["dynamic", "stochastic"],
    Field(
        description="dynamic: the likeliest nodes; stochastic: drawn, and verified by "
        "recursive rejection"
    ),
]
TopK = Annotated[
    DraftCount,
    Field(description="children per node, and nodes of each level that get children"),
]
NumDrafts = Annotated[
    DraftCount | None,
    Field(
        description="draft tokens at most, the best of all levels are kept; null, for "
        "a stochastic tree: top_k of each level"
    ),
]


class DynamicTreeConfig(HeadMethodConfig):
    """What methods share whose trees hold the likeliest nodes, by default.

    Their ``SHAPE`` begins with children per node, levels, and draft tokens.
    """

    @property
    @abstractmethod
    def prunes_by_cost(self) -> bool:
        """Whether its trees are dynamic ones."""

    def smaller_shapes(self) -> list[dict[str, Any]]:
        """Smaller trees down to one level of two; of a dynamic one, one level."""
        shape = self.shape
        return [
            {
                key: min(size, shape[key])
                for key, size in zip(self.SHAPE, sizes, strict=False)
                if key in shape
            }
            for sizes in (ONE_LEVEL if self.prunes_by_cost else SMALLER)
        ]


class GrownTreeConfig(DynamicTreeConfig):
    """What methods share whose head gives each node children of its own.

    A method says which kinds of ``tree`` it has.
    """

    SHAPE: ClassVar[tuple[str, ...]] = (
        "top_k",
        "depth",
        "num_drafts",
        "min_probability",
    )

    tree: str = "dynamic"
    top_k: TopK = 4
    depth: DraftCount = Field(default=3, description="levels below the root")
    num_drafts: NumDrafts = 8
    min_probability: DynamicMinProbability = None

    @property
    def rule(self) -> Rule:
        """Drawn trees have a distribution to reject by."""
        return RECURSIVE_REJECTION if self.tree == "stochastic" else super().rule

    @property
    def prunes_by_cost(self) -> bool:
        """Whether its trees are dynamic ones."""
        return self.tree == "dynamic"

    @property
    def grown_sizes(self) -> TreeSizes:
        """How large a tree of ``grower`` becomes."""
        if self.num_drafts is None:
            return rsd_s.sizes(self.top_k, self.depth)
        grown = dynamic_tree if self.tree == "dynamic" else stochastic_tree
        return grown.sizes(self.top_k, self.depth, self.num_drafts)

    def grower(
        self, dynamic: type[DynamicTree] = DynamicTree
    ) -> DynamicTree | StochasticTree | RsdS:
        """Make what grows a tree of a draft model's logits.

        Args:
            dynamic: what makes dynamic trees.

        """
        shape = self.top_k, self.depth
        if self.num_drafts is None:
            return RsdS(*shape)
        if self.tree == "stochastic":
            return StochasticTree(*shape, self.num_drafts)
        return dynamic(*shape, self.num_drafts, self.min_probability or 0.0)

    @field_validator("num_drafts")
    @classmethod
    def _only_levels_of_draws_have_a_width(
        cls, num_drafts: int | None, info: ValidationInfo
    ) -> int | None:
        if num_drafts is None and info.data.get("tree") != "stochastic":
            example = cls.model_fields["num_drafts"].default
            raise ValueError(
                "null keeps all that was drawn, and only a stochastic tree is drawn; "
                f"write a number such as {example}, or 'tree' 'stochastic'"
            )
        return num_drafts
