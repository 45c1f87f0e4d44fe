"""What a proposer returns: its trees, and what it claims of their nodes."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from vllm_treespec.trees.tree import TreeBatch

NO_TOKEN = -1


@dataclass(frozen=True)
class ShadowDrafts:
    """Drafts that were left out for their cost, and still show what claims are worth.

    A tree without drafts has one: the token that its index found likeliest.
    """

    # int64 [num_reqs]; NO_TOKEN where a tree has drafts, or nothing was likely enough
    token_ids: Tensor
    # float64 [num_reqs], how likely each is accepted; 0 where there is none
    claims: Tensor


@dataclass(frozen=True)
class Draft:
    """Draft trees of a batch of requests, with the claims and sources of their nodes.

    The *claim* of a node is the probability that it is accepted, by its source's own
    estimate. Claims of a tree, or of its first nodes, add up to the number of drafts
    that are accepted on average, as far as its source is right.
    """

    tree: TreeBatch
    # float64 [num_reqs, max_nodes]; 0 at roots and in unused entries. None: nothing is
    # claimed
    claims: Tensor | None = None
    # that draft models read for these trees
    levels: int = 0
    # int64 [num_reqs, max_nodes], bits of ``Source`` of each node; 0 at roots and in
    # unused entries. None: all nodes have the method's one source
    sources: Tensor | None = None
    # of trees without drafts; None: there are none
    shadow: ShadowDrafts | None = None
