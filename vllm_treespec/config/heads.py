"""What the spec-configs of all methods share that draft with a head."""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import Field

from vllm_treespec.config.base import MethodConfig

# Smaller trees by top_k, depth and num_drafts, and their batch sizes.
SMALLER = (((4, 2, 5), 1), ((4, 1, 4), 2), ((2, 1, 2), 4))


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
    def rule(self) -> str:
        """Drafts that were not drawn have no distribution to reject by."""
        return "target_draw"


def smaller_trees(
    top_k: int, depth: int, num_drafts: int | None
) -> list[tuple[dict[str, Any], int]]:
    """Smaller trees for the default schedule, with their batch sizes.

    Two levels of five draft tokens, then one of four, then of two.

    Args:
        top_k: of the whole tree; and alike the two others.
        depth: levels.
        num_drafts: None where the tree keeps ``top_k`` of each level.

    """
    shapes = []
    for (width, levels, kept), batch_size in SMALLER:
        shape = {"top_k": min(width, top_k), "depth": min(levels, depth)}
        if num_drafts is not None:
            shape["num_drafts"] = min(kept, num_drafts)
        shapes.append((shape, batch_size))
    return shapes


def refuse_no_limit(tree: object, num_drafts: int) -> None:
    """Refuse a spec-config without ``num_drafts`` whose tree is not drawn.

    Raises:
        ValueError: naming ``num_drafts`` as an example.

    """
    if tree != "stochastic":
        raise ValueError(
            "null keeps all that was drawn, and only a stochastic tree is drawn; "
            f"write a number such as {num_drafts}, or 'tree' 'stochastic'"
        )
