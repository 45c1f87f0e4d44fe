"""The cost of verifying without tree attention: one chain of rows per beam.

Each beam's path is lengthened below its leaf by as many filler nodes as it shares nodes
with earlier beams. So the target reads beam_width x length draft rows, and accepts the
same tokens: fillers hold a token that ends texts.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from vllm_treespec.proposers import Proposer, ProposerInputs
from vllm_treespec.trees.draft import Draft
from vllm_treespec.trees.sizes import TreeSizes
from vllm_treespec.trees.tree import NO_NODE, TreeBatch, ancestor_mask

# What unused entries of a tree hold, too.
FILLER_TOKEN = 0


class Chains(Proposer):
    """Deterministic beams that share nothing; greedy requests only."""

    name = "chains"

    def __init__(self, beams: Proposer) -> None:
        """Take the proposer of beams, which must keep all their tokens."""
        assert beams.num_beam_tokens is not None
        self.beams = beams
        self.num_beam_tokens = beams.num_beam_tokens
        self.sizes = TreeSizes(
            max_nodes=1 + beams.num_beam_tokens,
            max_depth=2 * beams.sizes.max_depth - 1,
            max_width=beams.sizes.max_width,
            max_leaves=beams.sizes.max_leaves,
            num_uniforms=beams.sizes.num_uniforms,
        )

    def propose(self, inputs: ProposerInputs) -> Draft:
        """Draw beams and give each its own rows."""
        beams = self.beams.propose(inputs)
        return Draft(without_sharing(beams.tree), levels=beams.levels)


def use_chains(worker: Any, wanted: bool) -> None:
    """Let a worker verify its present tree's beams as chains, or as a tree again."""
    method = worker.model_runner.decoder.method
    proposer = method.proposers[method.schedule.forced_index]
    if wanted:
        method.proposers[method.schedule.forced_index] = Chains(proposer)
    elif isinstance(proposer, Chains):
        method.proposers[method.schedule.forced_index] = proposer.beams


def without_sharing(tree: TreeBatch) -> TreeBatch:
    """Add below each leaf, all at one depth, as many nodes as its path shares."""
    shared = shared_nodes(tree)
    num_nodes = tree.num_nodes
    more = (0, int(shared.sum(1).max()) + 1)
    tokens = pad(tree.token_ids, more, value=FILLER_TOKEN)
    parents = pad(tree.parents, more, value=NO_NODE)
    depths = pad(tree.depths, more)
    spare = tokens.shape[1] - 1
    end = torch.arange(tree.max_nodes, device=tokens.device).expand_as(shared)
    for level in range(int(shared.max())):
        grows = shared > level
        new = grows.cumsum(1) - 1 + num_nodes[:, None]
        place = torch.where(grows, new, spare)
        parents.scatter_(1, place, end)
        depths.scatter_(1, place, tree.depths + level + 1)
        end = torch.where(grows, new, end)
        num_nodes = num_nodes + grows.sum(1)
    used = slice(int(num_nodes.max()))
    tokens, parents, depths = tokens[:, used], parents[:, used], depths[:, used]
    return TreeBatch(tokens, parents, depths, num_nodes).cut(num_nodes)


def shared_nodes(tree: TreeBatch) -> Tensor:
    """Draft nodes that each leaf's path shares with earlier ones: [num_reqs, nodes]."""
    is_draft = tree.is_node() & (tree.depths > 0)
    ancestors = ancestor_mask(tree) & tree.is_node()[:, :, None]
    is_leaf = (ancestors.sum(1) == 1) & is_draft
    # the first leaf below each node
    owner = (ancestors & is_leaf[:, :, None]).int().argmax(dim=1)
    own = torch.zeros_like(tree.parents).scatter_add_(1, owner, is_draft.long())
    return torch.where(is_leaf, tree.depths - own, 0)
