"""The cost of verifying without tree attention: one chain of rows per beam.

Siblings of a tree are distinct, so a tree cannot hold a prefix twice. Here each beam's
path is lengthened by as many filler nodes as it shares nodes with earlier beams. The
target then reads beam_width x length draft rows along beam_width branches, length rows
each, which is what beams cost that are verified one beside the other; and the same
tokens are accepted, because fillers lie below the leaves and hold a token that ends
texts.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from vllm_treespec.core.sizes import TreeSizes
from vllm_treespec.core.tree import NO_NODE, TreeBatch, ancestor_mask
from vllm_treespec.proposers import Proposer, ProposerInputs

# What unused entries of a tree hold, too.
FILLER_TOKEN = 0


class Chains(Proposer):
    """Deterministic beams that share nothing; greedy requests only."""

    name = "chains"

    def __init__(self, beams: Proposer) -> None:
        """Take the proposer of beams, which must keep all their tokens."""
        assert beams.num_candidates is not None
        self.beams = beams
        self.num_draft_models = beams.num_draft_models
        self.num_candidates = beams.num_candidates
        self.sizes = TreeSizes(
            max_nodes=1 + beams.num_candidates,
            max_depth=2 * beams.sizes.max_depth - 1,
            max_width=beams.sizes.max_width,
            max_leaves=beams.sizes.max_leaves,
            num_uniforms=beams.sizes.num_uniforms,
        )

    def propose(self, inputs: ProposerInputs) -> TreeBatch:
        """Draw beams and give each its own rows."""
        return without_sharing(self.beams.propose(inputs))


def use_chains(worker: Any, wanted: bool) -> None:
    """Let a worker verify its present tree's beams as chains, or as a tree again."""
    method = worker.model_runner.decoder.method
    present = method.schedule.always
    proposer = method.proposers[present]
    if wanted:
        method.proposers[present] = Chains(proposer)
    elif isinstance(proposer, Chains):
        method.proposers[present] = proposer.beams


def without_sharing(tree: TreeBatch) -> TreeBatch:
    """Add below each leaf as many nodes as its path shares with earlier leaves.

    Args:
        tree: all leaves at one depth.

    """
    shared = shared_nodes(tree)
    num_nodes = tree.num_nodes
    pad = (0, int(shared.sum(1).max()) + 1)
    tokens = torch.nn.functional.pad(tree.token_ids, pad, value=FILLER_TOKEN)
    parents = torch.nn.functional.pad(tree.parents, pad, value=NO_NODE)
    depths = torch.nn.functional.pad(tree.depths, pad)
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
    width = int(num_nodes.max())
    return TreeBatch(
        token_ids=tokens[:, :width],
        parents=parents[:, :width],
        depths=depths[:, :width],
        num_nodes=num_nodes,
    ).cut(num_nodes)


def shared_nodes(tree: TreeBatch) -> Tensor:
    """Draft nodes on each leaf's path that an earlier leaf's path holds, too.

    Returns:
        int64 [num_reqs, max_nodes], 0 at nodes that are no leaves.

    """
    ancestors = ancestor_mask(tree) & tree.is_node()[:, :, None]
    is_leaf = (ancestors.sum(1) == 1) & tree.is_node() & (tree.depths > 0)
    below = ancestors & is_leaf[:, :, None]
    # the first leaf below each node
    owner = below.int().argmax(dim=1)
    own = torch.zeros_like(tree.parents)
    own.scatter_add_(1, owner, (tree.is_node() & (tree.depths > 0)).long())
    return torch.where(is_leaf, tree.depths - own, 0)
