"""Draft trees of a batch of requests, and the pure functions on them (torch only)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

MAX_NODES = 64
NO_NODE = -1


@dataclass(frozen=True)
class TreeBatch:
    """One draft tree per request, padded to the widest tree of the batch.

    Node 0 is the root: the last committed token, already certain. Draft nodes
    follow in level order, the children of one node side by side in the order in
    which they were drawn; verification depends on that order. Any prefix of the
    nodes is again a tree. Row ``i`` of a request's target logits belongs to node
    ``i``. Example, one request whose tokens are written as letters::

        depth 0          r                node        0   1   2   3   4   5
                       /   \\              token_ids   r   a   b   c   d   e
        depth 1       a     b             parents    -1   0   0   1   1   2
                     / \\     \\            depths      0   1   1   2   2   2
        depth 2     c   d     e           first_child 1   3   5  -1  -1  -1
                                          next_sibling -1  2  -1   4  -1  -1
        num_nodes = 6                     draft_rows  0   1   2   .   .   .

    ``draft_rows`` points into ``draft_probs``: a and b were drawn from
    ``draft_probs[request, 0]``, c and d from row 1, e from row 2. Rows of nodes
    without children mean nothing. Unused entries hold token 0 and parent -1.
    """

    # int64 [num_reqs, max_nodes]
    token_ids: Tensor
    # int64 [num_reqs, max_nodes]; -1 at the root and in unused entries
    parents: Tensor
    # int64 [num_reqs, max_nodes]; edges from the root
    depths: Tensor
    # int64 [num_reqs]; root included
    num_nodes: Tensor
    # int64 [num_reqs, max_nodes]
    draft_rows: Tensor
    # float32 [num_reqs, num_rows, vocab_size]; None = deterministic drafts
    draft_probs: Tensor | None = None
    # whether siblings were drawn independently of each other
    with_replacement: bool = False

    @property
    def num_reqs(self) -> int:
        """Number of trees."""
        return self.token_ids.shape[0]

    @property
    def max_nodes(self) -> int:
        """Width of the padded node axis, root included."""
        return self.token_ids.shape[1]

    @property
    def cu_num_nodes(self) -> Tensor:
        """Cumulative node counts, int64 [num_reqs + 1], first entry 0."""
        return torch.nn.functional.pad(self.num_nodes.cumsum(0), (1, 0))

    def is_node(self) -> Tensor:
        """Whether an entry holds a node, bool [num_reqs, max_nodes]."""
        columns = torch.arange(self.max_nodes, device=self.token_ids.device)
        return columns < self.num_nodes[:, None]

    def select(self, rows: Tensor) -> TreeBatch:
        """Return the trees of the given requests, ``rows`` int64 [n]."""
        probs = None if self.draft_probs is None else self.draft_probs[rows]
        return replace(
            self,
            token_ids=self.token_ids[rows],
            parents=self.parents[rows],
            depths=self.depths[rows],
            num_nodes=self.num_nodes[rows],
            draft_rows=self.draft_rows[rows],
            draft_probs=probs,
        )

    def cut(self, num_nodes: Tensor) -> TreeBatch:
        """Keep at most the first ``num_nodes`` int64 [num_reqs] nodes of each tree."""
        kept = torch.minimum(self.num_nodes, num_nodes)
        columns = torch.arange(self.max_nodes, device=self.token_ids.device)
        gone = columns >= kept[:, None]
        return replace(
            self,
            token_ids=self.token_ids.masked_fill(gone, 0),
            parents=self.parents.masked_fill(gone, NO_NODE),
            depths=self.depths.masked_fill(gone, 0),
            num_nodes=kept,
        )


def from_levels(
    root_token_ids: Tensor,
    token_ids: Sequence[Tensor],
    parents: Sequence[Tensor],
    valid: Sequence[Tensor],
    draft_probs: Tensor | None,
) -> TreeBatch:
    """Build the trees from their levels, leaving out invalid nodes.

    Args:
        root_token_ids: int64 [num_reqs].
        token_ids: per level below the root, int64 [num_reqs, width].
        parents: per level, int64 [num_reqs, width]: index *within the level above*,
            ascending along the row, so that siblings lie side by side.
        valid: per level, bool [num_reqs, width]; a valid node has a valid parent.
        draft_probs: float32 [num_reqs, num_rows, vocab_size]; row ``i`` belongs to
            node ``i`` counted before invalid nodes are left out. None when the
            drafts are deterministic.

    """
    num_reqs, device = root_token_ids.shape[0], root_token_ids.device
    widths = [1] + [level.shape[1] for level in token_ids]
    starts = [sum(widths[:depth]) for depth in range(len(token_ids))]
    root_column = torch.full((num_reqs, 1), NO_NODE, device=device)
    flat_tokens = torch.cat([root_token_ids[:, None], *token_ids], dim=1)
    flat_parents = torch.cat(
        [root_column] + [p + s for p, s in zip(parents, starts, strict=True)], dim=1
    )
    flat_valid = torch.cat([torch.ones_like(root_column, dtype=torch.bool), *valid], 1)
    flat_depths = torch.repeat_interleave(
        torch.arange(len(widths), device=device), torch.tensor(widths, device=device)
    ).expand(num_reqs, -1)

    order = torch.argsort(~flat_valid, dim=1, stable=True)
    new_index = flat_valid.cumsum(1) - 1
    kept = flat_valid.gather(1, order)
    moved_parents = new_index.gather(1, flat_parents.clamp(min=0)).gather(1, order)
    moved_parents = moved_parents.masked_fill(~kept, NO_NODE)
    moved_parents[:, 0] = NO_NODE
    return TreeBatch(
        token_ids=flat_tokens.gather(1, order).masked_fill(~kept, 0),
        parents=moved_parents,
        depths=flat_depths.gather(1, order).masked_fill(~kept, 0),
        num_nodes=flat_valid.sum(1),
        draft_rows=order,
        draft_probs=draft_probs,
    )


def from_parents(
    token_ids: Sequence[Sequence[int]], parents: Sequence[Sequence[int]]
) -> TreeBatch:
    """Build trees from per-request lists in level order; for tests and examples.

    Raises:
        ValueError: when a parent does not precede its child, siblings are not side
            by side, or a tree has more than 64 nodes.

    """
    max_nodes = max(len(row) for row in parents)
    if max_nodes > MAX_NODES:
        raise ValueError(f"a tree has {max_nodes} nodes; at most {MAX_NODES} fit")
    num_reqs = len(parents)
    shape = (num_reqs, max_nodes)
    tokens = torch.zeros(shape, dtype=torch.int64)
    parent = torch.full(shape, NO_NODE, dtype=torch.int64)
    depth = torch.zeros(shape, dtype=torch.int64)
    for r, (row_tokens, row_parents) in enumerate(zip(token_ids, parents, strict=True)):
        if row_parents[0] != NO_NODE or list(row_parents[1:]) != sorted(
            row_parents[1:]
        ):
            raise ValueError(f"parents {list(row_parents)} are not in level order")
        for i, p in enumerate(row_parents):
            if i and not 0 <= p < i:
                raise ValueError(f"node {i} has parent {p}; parents come first")
            depth[r, i] = depth[r, p] + 1 if i else 0
        tokens[r, : len(row_tokens)] = torch.tensor(row_tokens)
        parent[r, : len(row_parents)] = torch.tensor(row_parents)
    return TreeBatch(
        token_ids=tokens,
        parents=parent,
        depths=depth,
        num_nodes=torch.tensor([len(row) for row in parents]),
        draft_rows=torch.arange(max_nodes).expand(shape),
    )


def first_child(tree: TreeBatch) -> Tensor:
    """First drawn child of every node, int64 [num_reqs, max_nodes], -1 where none."""
    num_reqs, max_nodes = tree.token_ids.shape
    device = tree.token_ids.device
    spare = tree.parents.masked_fill(tree.parents < 0, max_nodes)
    columns = torch.arange(max_nodes, device=device).expand(num_reqs, -1)
    first = torch.full((num_reqs, max_nodes + 1), max_nodes, device=device)
    first.scatter_reduce_(1, spare, columns, "amin")
    first = first[:, :max_nodes]
    return first.masked_fill(first == max_nodes, NO_NODE)


def next_sibling(tree: TreeBatch) -> Tensor:
    """Next drawn sibling of every node, int64 [num_reqs, max_nodes], -1 where none."""
    columns = torch.arange(1, tree.max_nodes + 1, device=tree.token_ids.device)
    following = torch.nn.functional.pad(tree.parents[:, 1:], (0, 1), value=NO_NODE)
    same = (following == tree.parents) & (tree.parents >= 0)
    return torch.where(same, columns, NO_NODE)


def ancestor_mask(tree: TreeBatch) -> Tensor:
    """Ancestor-or-self relation, bool [num_reqs, max_nodes, max_nodes].

    Entry ``[r, i, j]`` is True when node ``j`` lies on the path from the root to
    node ``i``, so that node ``i`` may attend to it: the row of a node is its
    parent's row and itself. Unused entries see only themselves.
    """
    num_reqs, max_nodes = tree.token_ids.shape
    mask = torch.eye(max_nodes, dtype=torch.bool, device=tree.token_ids.device)
    mask = mask.repeat(num_reqs, 1, 1)
    ancestor = tree.parents
    for _ in range(max_nodes):
        found = ancestor >= 0
        if not bool(found.any()):
            break
        index = ancestor.clamp(min=0)
        mask.scatter_(
            2, index[..., None], (mask.gather(2, index[..., None]) | found[..., None])
        )
        ancestor = torch.where(found, tree.parents.gather(1, index), NO_NODE)
    return mask


def preorder(tree: TreeBatch, ancestors: Tensor) -> Tensor:
    """Rank of every node in depth-first order, int64 [num_reqs, max_nodes].

    Along this order every root-to-leaf path is a run of new nodes that ends in its
    leaf. Unused entries come last. ``ancestors`` is :func:`ancestor_mask`'s result.
    """
    is_node = tree.is_node()
    subtree_size = (ancestors & is_node[..., None]).sum(1)
    before = torch.nn.functional.pad(subtree_size.cumsum(1), (1, 0))[:, :-1]
    first = first_child(tree)
    oldest = first.gather(1, tree.parents.clamp(min=0)).clamp(min=0)
    earlier_siblings = before - before.gather(1, oldest)
    step = torch.where(tree.parents >= 0, 1 + earlier_siblings, 0)
    rank = (ancestors * step[:, None, :]).sum(2)
    columns = torch.arange(tree.max_nodes, device=rank.device).expand_as(rank)
    return torch.where(is_node, rank, columns)
