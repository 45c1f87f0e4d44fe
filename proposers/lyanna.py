"""Lyanna: trees over chains of logits, some of which an earlier step left over."""

from __future__ import annotations

from dataclasses import replace

import torch

from vllm_treespec.proposers.base import Proposer, ProposerInputs
from vllm_treespec.proposers.dynamic_tree import DynamicTree
from vllm_treespec.proposers.rsd_s import RsdS
from vllm_treespec.proposers.stochastic_tree import StochasticTree
from vllm_treespec.sources.chain import ChainDraft
from vllm_treespec.trees.draft import Draft
from vllm_treespec.trees.host_trees import merge_drafts, nodes_on_host
from vllm_treespec.trees.sizes import TreeSizes
from vllm_treespec.trees.source import Source


def sizes(tree: TreeSizes, leftover: TreeSizes | None = None) -> TreeSizes:
    """Sizes of trees over chains.

    Args:
        tree: of the fresh chain's tree.
        leftover: of the tree that is merged with it; None: there is none.

    """
    # A chain is one node a level, and its last level is not read.
    reads = {"draft_width": 1, "draft_nodes": max(tree.max_depth - 1, 1)}
    if leftover is None:
        return replace(tree, **reads)
    return TreeSizes(
        max_nodes=tree.max_nodes + leftover.max_nodes - 1,
        max_depth=max(tree.max_depth, leftover.max_depth),
        max_width=tree.max_width + leftover.max_width,
        max_leaves=tree.max_leaves + leftover.max_leaves,
        max_siblings=tree.max_siblings + leftover.max_siblings,
        max_parents=tree.max_parents + leftover.max_parents - 1,
        num_uniforms=max(tree.num_uniforms, leftover.num_uniforms),
        **reads,
    )


class Lyanna(Proposer):
    """Drafts the trees of arXiv 2602.21224, sections 5.2, 5.3 and 6.2.

    The tree is that of any other draft model; only, its source is a ``ChainDraft``. A
    second tree, of the likeliest nodes below the same root, may be drafted from what
    the step before left over. Both are verified as one (section 6.2). The source of a
    node is the model, if its chain is fresh, or what was left over, or both.
    """

    def __init__(
        self,
        tree: DynamicTree | StochasticTree | RsdS,
        leftover: DynamicTree | None = None,
    ) -> None:
        """Take what drafts the tree, and what drafts the one that is merged with it."""
        self.tree = tree
        self.leftover = leftover
        self.sizes = sizes(tree.sizes, None if leftover is None else leftover.sizes)

    def propose(self, inputs: ProposerInputs) -> Draft:
        """Draft one tree per request; nothing is read."""
        (draft,) = inputs.draft_models
        assert isinstance(draft, ChainDraft)
        drafted = self.tree.propose(replace(inputs, levels=draft.levels_left))
        if draft.reused is not None:
            source = torch.where(draft.reused, Source.LEFTOVER, Source.MODEL)
            sources = (drafted.tree.depths > 0) * source[:, None]
            drafted = replace(drafted, sources=sources)
        left = draft.leftover
        if self.leftover is None or left is None:
            return drafted
        second = self.leftover.propose(
            replace(inputs, draft_models=[left], levels=left.levels_left)
        )
        max_nodes, trees = self.sizes.max_nodes, nodes_on_host(drafted, Source.MODEL)
        places = [max_nodes] * len(trees)
        merged = merge_drafts(trees, second, Source.LEFTOVER, places, max_nodes)
        return replace(merged, levels=drafted.levels + merged.levels)
