"""DFlash: trees over the logits of all levels, which one forward made."""

from __future__ import annotations

from dataclasses import replace

from vllm_treespec.proposers.base import Proposer, ProposerInputs
from vllm_treespec.proposers.dynamic_tree import DynamicTree
from vllm_treespec.proposers.rsd_s import RsdS
from vllm_treespec.proposers.stochastic_tree import StochasticTree
from vllm_treespec.trees.draft import Draft
from vllm_treespec.trees.sizes import TreeSizes


def sizes(tree: TreeSizes) -> TreeSizes:
    """Sizes of trees over a block: one forward reads the root and a row a level."""
    rows = 1 + tree.max_depth
    return replace(tree, draft_forwards=1, draft_width=1, draft_nodes=rows)


class DFlash(Proposer):
    """Drafts trees from heads of arXiv 2602.06036, 2606.18394 and 2607.05147.

    The tree is that of any other draft model. A head that conditions on a node's token
    (DSpark, DFlash2) has logits for each node; one that does not (DFlash, JetSpec) has
    the same for all nodes of a level.
    """

    def __init__(self, tree: DynamicTree | StochasticTree | RsdS) -> None:
        """Take what drafts the tree."""
        self.tree = tree
        self.sizes = sizes(tree.sizes)

    def propose(self, inputs: ProposerInputs) -> Draft:
        """Draft one tree per request; levels after the first cost no forward."""
        plan = replace(inputs.plan, level_cost=0.0, max_levels=None)
        draft = self.tree.propose(replace(inputs, plan=plan))
        return replace(draft, levels=1)
