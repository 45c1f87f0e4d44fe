"""Whether trees, and the forwards that grew them, stay within announced sizes."""

from __future__ import annotations

from collections import Counter

from torch import Tensor

from vllm_treespec.sources.base import DraftModel
from vllm_treespec.trees.sizes import TreeSizes
from vllm_treespec.trees.tree import TreeBatch


class CountingDraft:
    """A draft model that notes how many nodes each of its forwards reads."""

    def __init__(self, draft: DraftModel) -> None:
        self.draft, self.vocabulary = draft, draft.vocabulary
        self.widths: list[int] = []

    def root_logits(self) -> Tensor:
        return self.draft.root_logits()

    def extend(self, token_ids: Tensor, parents: Tensor) -> Tensor:
        self.widths.append(token_ids.shape[1])
        return self.draft.extend(token_ids, parents)


def check_bounds(sizes: TreeSizes, tree: TreeBatch, widths: list[int]) -> None:
    """Fail where a tree, or a level that was read, is larger than announced."""
    assert tree.max_nodes <= sizes.max_nodes
    assert max(widths, default=0) <= sizes.draft_width
    assert sum(widths) <= sizes.draft_nodes
    for req, num_nodes in enumerate(tree.num_nodes.tolist()):
        children = Counter(tree.parents[req, 1:num_nodes].tolist())
        levels = Counter(tree.depths[req, 1:num_nodes].tolist())
        assert max(levels, default=0) <= sizes.max_depth
        assert max(levels.values(), default=0) <= sizes.max_width
        assert max(children.values(), default=0) <= sizes.max_siblings
        assert len(children) <= sizes.max_parents
        assert num_nodes - len(children) <= sizes.max_leaves
    if tree.draws is not None:
        assert tree.draws.nodes.shape[1] <= sizes.max_draws
