"""How large the draft trees of one shape become."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields


@dataclass(frozen=True, kw_only=True)
class TreeSizes:
    """Upper bounds on the trees of one shape; the engine makes room for them.

    Attributes:
        max_nodes: nodes of the largest tree, root included.
        max_depth: levels below the root.
        max_width: nodes of the widest level.
        max_leaves: leaves of the most branching tree.
        draft_depth: levels that a draft model or a head drafts; left out:
            ``max_depth``.
        draft_forwards: forwards of a draft model or a head that draft a tree; left
            out: ``draft_depth``.
        draft_width: most nodes that one forward of a draft model reads; left out:
            ``max_width``.
        draft_nodes: most nodes that a draft model reads in all levels; left out: all
            draft nodes.
        num_uniforms: uniform numbers that drafting one tree takes; 0 where drafts
            are not drawn.
        max_draws: draws behind the largest tree, repeats included; left out: as many
            as draft nodes.
        max_siblings: most draws below one node, repeats included; left out:
            ``max_width``.
        max_parents: most nodes with draws below them; left out: the root, and a widest
            level at every depth but the last.

    """

    max_nodes: int
    max_depth: int
    max_width: int
    max_leaves: int
    draft_depth: int = 0
    draft_forwards: int = 0
    draft_width: int = 0
    draft_nodes: int = 0
    num_uniforms: int = 0
    max_draws: int = 0
    max_siblings: int = 0
    max_parents: int = 0

    @property
    def fork_rows(self) -> int:
        """Rows of a tree that lie behind one another in a draft model's fork.

        A head that reads a whole block at once lays it out in one fork.
        """
        return max(self.max_depth, self.draft_nodes // self.draft_width)

    @classmethod
    def largest(cls, sizes: Sequence[TreeSizes]) -> TreeSizes:
        """Bounds on trees of all these shapes."""
        return cls(
            **{
                field.name: max(getattr(s, field.name) for s in sizes)
                for field in fields(cls)
            }
        )

    def __post_init__(self) -> None:
        """Put the bounds in place that were left out, which 0 stands for."""
        parents = min(self.max_nodes, 1 + (self.max_depth - 1) * self.max_width)
        object.__setattr__(self, "draft_depth", self.draft_depth or self.max_depth)
        forwards = self.draft_forwards or self.draft_depth
        object.__setattr__(self, "draft_forwards", forwards)
        object.__setattr__(self, "draft_width", self.draft_width or self.max_width)
        object.__setattr__(self, "draft_nodes", self.draft_nodes or self.max_nodes - 1)
        object.__setattr__(self, "max_draws", self.max_draws or self.max_nodes - 1)
        object.__setattr__(self, "max_siblings", self.max_siblings or self.max_width)
        object.__setattr__(self, "max_parents", self.max_parents or parents)
