"""What a proposer returns: its trees, and what it claims of their nodes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from torch import Tensor

from vllm_treespec.host_copies import on_host
from vllm_treespec.trees.tree import TreeBatch

NO_TOKEN = -1


@dataclass(frozen=True)
class HostDraft:
    """What the host reads of a draft, but for ``num_nodes`` of the draft nodes alone.

    A *shadow draft* was left out for its cost, and still shows what claims are worth: a
    tree without drafts has one, the token that its index found likeliest.
    """

    # int64 [num_reqs, max_nodes - 1]; see ``TreeBatch``
    token_ids: np.ndarray
    parents: np.ndarray
    # int64 [num_reqs], roots included
    num_nodes: np.ndarray
    # float64 and int64 [num_reqs, max_nodes - 1]; see ``Draft``
    claims: np.ndarray | None = None
    sources: np.ndarray | None = None
    # int64 [num_reqs], NO_TOKEN where a tree has drafts, or nothing was likely enough;
    # and float64 [num_reqs], how likely each is accepted, 0 where there is none. None:
    # there are none
    shadow_token_ids: np.ndarray | None = None
    shadow_claims: np.ndarray | None = None


class HostMade(NamedTuple):
    """What the host has of trees that it made: of these, and no others."""

    tree: TreeBatch
    parts: HostDraft


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
    # of trees that the host made what it has of them, claims and sources alone there
    host_made: HostMade | None = None

    def host_parts(self) -> dict[str, Tensor | None]:
        """What the host reads of trees that a device made, as in ``HostDraft``."""
        tree, claims, sources = self.tree, self.claims, self.sources
        return {
            "token_ids": tree.token_ids[:, 1:],
            "parents": tree.parents[:, 1:],
            "num_nodes": tree.num_nodes,
            "claims": None if claims is None else claims[:, 1:],
            "sources": None if sources is None else sources[:, 1:],
        }

    def on_host(self) -> HostDraft:
        """What the host reads; it waits for a device once, unless it made the trees."""
        if self.host_made is not None and self.host_made.tree is self.tree:
            return self.host_made.parts
        return HostDraft(**on_host(self.host_parts()))
