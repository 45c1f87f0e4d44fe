"""Draft trees of a batch of requests, and the pure functions on them (torch only)."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

MAX_NODES = 64
NO_NODE = -1


@dataclass(frozen=True)
class Draws:
    """What was drawn from the draft, in draw order.

    The draws of one parent stand side by side, parents in level order. Draws with
    replacement, or of several draft models, may hit one node several times.
    """

    # int64 [num_reqs, max_draws], node that holds the drawn token; 0 = unused entry
    nodes: Tensor
    # int64 [num_reqs, max_draws], row of ``probs`` it was drawn from
    rows: Tensor
    # bool [num_reqs, max_draws]: drawn from what the draw before it left over
    # (without replacement), else independently of it
    without_replacement: Tensor
    # float32 [num_reqs, num_rows, draft_vocab_size]
    probs: Tensor
    # int64 [draft_vocab_size], ascending, the token of every column of ``probs``;
    # None = the target's whole vocabulary
    vocabulary: Tensor | None = None
    # A tree that is cut to fewer nodes keeps no draws: whether a node is among its
    # first ones depends on draws that come later (``from_candidates``).
    min_nodes: int = 0

    def select(self, reqs: Tensor) -> Draws:
        """Return the draws of the given requests, ``reqs`` int64 [n]."""
        return replace(
            self,
            nodes=self.nodes[reqs],
            rows=self.rows[reqs],
            without_replacement=self.without_replacement[reqs],
            probs=self.probs[reqs],
        )

    def probs_of(self, reqs: Tensor, rows: Tensor, vocab_size: int) -> Tensor:
        """Distributions over the target's vocabulary, float32 [n, vocab_size].

        Args:
            reqs: int64 [n].
            rows: int64 [n], of each request's ``probs``.
            vocab_size: the target's; tokens that no column stands for get 0.

        """
        probs = self.probs[reqs, rows]
        if self.vocabulary is None:
            return probs
        every = probs.new_zeros((len(probs), vocab_size))
        return every.index_copy_(1, self.vocabulary, probs)


@dataclass(frozen=True)
class TreeBatch:
    r"""One draft tree per request, padded to the widest tree of the batch.

    Node 0 is the root: the last committed token, already certain. Draft nodes
    follow in level order, the children of one node side by side in the order in
    which they were drawn; verification depends on that order. Siblings have
    different tokens. Any prefix of the nodes is again a tree. Row ``i`` of a
    request's target logits belongs to node ``i``. Example, one request whose tokens
    are written as letters::

        depth 0          r                node        0   1   2   3   4   5
                       /   \              token_ids   r   a   b   c   d   e
        depth 1       a     b             parents    -1   0   0   1   1   2
                     / \     \            depths      0   1   1   2   2   2
        depth 2     c   d     e           first_child 1   3   5  -1  -1  -1
        num_nodes = 6

    If a, b were drawn without replacement from ``draws.probs[request, 0]``, c, d so
    from row 1, and e twice, with replacement, from row 2, then::

        draw                0      1      2      3      4      5
        draws.nodes         1      2      3      4      5      5
        draws.rows          0      0      1      1      2      2
        without_replacement no     yes    no     yes    no     no
        first_draw of nodes 0 to 5:  0, 2, 4, -1, -1, -1

    Unused entries hold token 0 and parent -1.
    """

    # int64 [num_reqs, max_nodes]
    token_ids: Tensor
    # int64 [num_reqs, max_nodes]; -1 at the root and in unused entries
    parents: Tensor
    # int64 [num_reqs, max_nodes]; edges from the root
    depths: Tensor
    # int64 [num_reqs]; root included
    num_nodes: Tensor
    # None = deterministic drafts
    draws: Draws | None = None

    @property
    def num_reqs(self) -> int:
        """Number of trees."""
        return self.token_ids.shape[0]

    @property
    def max_nodes(self) -> int:
        """Width of the padded node axis, root included."""
        return self.token_ids.shape[1]

    def is_node(self) -> Tensor:
        """Whether an entry holds a node, bool [num_reqs, max_nodes]."""
        columns = torch.arange(self.max_nodes, device=self.token_ids.device)
        return columns < self.num_nodes[:, None]

    def select(self, rows: Tensor) -> TreeBatch:
        """Return the trees of the given requests, ``rows`` int64 [n]."""
        return TreeBatch(
            token_ids=self.token_ids[rows],
            parents=self.parents[rows],
            depths=self.depths[rows],
            num_nodes=self.num_nodes[rows],
            draws=None if self.draws is None else self.draws.select(rows),
        )

    def cut(self, num_nodes: Tensor) -> TreeBatch:
        """Keep the nodes and draws that fit into ``num_nodes`` int64 [num_reqs].

        The limit must not depend on what was drawn. Whether a draw is kept does not
        depend on it either: a repeat goes where a new token would have gone, so that
        the law of the kept draws is that of fewer draws.
        """
        kept = torch.minimum(self.num_nodes, num_nodes)
        columns = torch.arange(self.max_nodes, device=self.token_ids.device)
        gone = columns >= kept[:, None]
        return TreeBatch(
            token_ids=self.token_ids.masked_fill(gone, 0),
            parents=self.parents.masked_fill(gone, NO_NODE),
            depths=self.depths.masked_fill(gone, 0),
            num_nodes=kept,
            draws=None
            if self.draws is None
            else self._cut_draws(self.draws, num_nodes),
        )

    def _cut_draws(self, draws: Draws, num_nodes: Tensor) -> Draws:
        """Keep the draws that had room whichever tokens they and siblings were."""
        parents = draw_parents(self)
        first = first_draw(self).gather(1, parents.clamp(min=0))
        highest = torch.nn.functional.pad(draws.nodes, (1, 0)).cummax(1).values
        columns = torch.arange(draws.nodes.shape[1], device=draws.nodes.device)
        place = highest.gather(1, first.clamp(min=0)) + columns - first + 1
        gone = (parents < 0) | (place >= num_nodes[:, None])
        gone |= (num_nodes < draws.min_nodes)[:, None]
        return replace(draws, nodes=draws.nodes.masked_fill(gone, 0))


def draw_parents(tree: TreeBatch) -> Tensor:
    """Parent of every draw, int64 [num_reqs, max_draws], -1 in unused entries."""
    assert tree.draws is not None
    return tree.parents.gather(1, tree.draws.nodes)


def first_draw(tree: TreeBatch) -> Tensor:
    """First draw below every node, int64 [num_reqs, max_nodes], -1 where none."""
    return _first_below(draw_parents(tree), tree.max_nodes)


def next_draw(tree: TreeBatch) -> Tensor:
    """Next draw of the same parent, int64 [num_reqs, max_draws], -1 where none."""
    parents = draw_parents(tree)
    columns = torch.arange(1, parents.shape[1] + 1, device=parents.device)
    next_parents = torch.nn.functional.pad(parents[:, 1:], (0, 1), value=NO_NODE)
    same = (next_parents == parents) & (parents >= 0)
    return torch.where(same, columns, NO_NODE)


def num_draws(tree: TreeBatch) -> Tensor:
    """Draws below every node, repeats included, int64 [num_reqs, max_nodes]."""
    parents = draw_parents(tree)
    used = (parents >= 0).long()
    counts = torch.zeros_like(tree.parents)
    return counts.scatter_add(1, parents.clamp(min=0), used)


def first_child(tree: TreeBatch) -> Tensor:
    """First drawn child of every node, int64 [num_reqs, max_nodes], -1 where none."""
    return _first_below(tree.parents, tree.max_nodes)


def _first_below(parents: Tensor, max_nodes: int) -> Tensor:
    """First column that names each node as parent, int64 [num_reqs, max_nodes]."""
    num_reqs, width = parents.shape
    spare = parents.masked_fill(parents < 0, max_nodes)
    columns = torch.arange(width, device=parents.device).expand(num_reqs, -1)
    first = torch.full((num_reqs, max_nodes + 1), width, device=parents.device)
    first.scatter_reduce_(1, spare, columns, "amin")
    first = first[:, :max_nodes]
    return first.masked_fill(first == width, NO_NODE)


def ancestor_mask(tree: TreeBatch) -> Tensor:
    """Ancestor-or-self relation, bool [num_reqs, max_nodes, max_nodes].

    Entry ``[r, i, j]`` is True when node ``j`` lies on the path from the root to
    node ``i``, so that node ``i`` may attend to it: the row of a node is its
    parent's row and itself. Unused entries see only themselves.
    """
    bits = ancestor_bits(tree, int(tree.depths.max()))
    nodes = torch.arange(tree.max_nodes, device=bits.device)
    return ((bits[..., None] >> nodes) & 1).bool() | (nodes[:, None] == nodes)


def node_bits(tree: TreeBatch) -> Tensor:
    """Bit of every node, int64 [max_nodes]: bit i, of 64, is node i's."""
    columns = torch.arange(tree.max_nodes, device=tree.token_ids.device)
    return torch.ones_like(columns) << columns


def ancestors(parents: np.ndarray, max_depth: int) -> tuple[np.ndarray, np.ndarray]:
    """Ancestors of every node as bits, and its depth, on the host.

    Args:
        parents: int64 [num_trees, max_nodes - 1], of the draft nodes; -1 in unused
            entries, of which nothing is told.
        max_depth: levels below the root, or more.

    Returns:
        int64 [num_trees, max_nodes], bits as those of ``ancestor_bits``; the same of
        depths.

    """
    ancestor = np.pad(parents.clip(min=0), ((0, 0), (1, 0)))
    columns = np.arange(ancestor.shape[1])
    bits = np.broadcast_to(np.int64(1) << columns, ancestor.shape)
    depths = np.broadcast_to((columns > 0).astype(np.int64), ancestor.shape)
    # as in ``ancestor_bits``
    for _ in range(max_depth.bit_length()):
        bits = bits | np.take_along_axis(bits, ancestor, axis=1)
        depths = depths + np.take_along_axis(depths, ancestor, axis=1)
        ancestor = np.take_along_axis(ancestor, ancestor, axis=1)
    return bits, depths


def ancestor_bits(tree: TreeBatch, max_depth: int) -> Tensor:
    """Ancestor-or-self relation as bits, int64 [num_reqs, max_nodes].

    Bit ``j`` of entry ``[r, i]`` is set when node ``j`` lies on the path from the root
    to node ``i`` (bit 63 is the sign). Unused entries are 0. The host does not wait for
    the device.

    Args:
        tree: the trees, of at most 64 nodes.
        max_depth: levels below the root, or more.

    """
    bits = node_bits(tree).expand_as(tree.parents)
    ancestor = tree.parents.clamp(min=0)
    # Each round doubles how far up the bits of an entry reach; the root stays there.
    for _ in range(max_depth.bit_length()):
        bits = bits | bits.gather(1, ancestor)
        ancestor = ancestor.gather(1, ancestor)
    return bits * tree.is_node()
