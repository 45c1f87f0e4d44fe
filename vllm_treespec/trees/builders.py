"""Draft trees from levels, candidates, draws that may repeat, and from lists.

Builders that give a ``Draft`` carry the claims of candidates over to the nodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from vllm_treespec.trees.draft import Draft
from vllm_treespec.trees.tree import MAX_NODES, NO_NODE, Draws, TreeBatch


def from_levels(
    root_token_ids: Tensor,
    token_ids: Sequence[Tensor],
    parents: Sequence[Tensor],
    valid: Sequence[Tensor],
    draft_probs: Tensor | None,
    vocabulary: Tensor | None = None,
    rows: Tensor | None = None,
    max_nodes: int | None = None,
    claims: Sequence[Tensor] | None = None,
) -> Draft:
    """Build the trees from their levels, leaving out invalid nodes.

    Args:
        root_token_ids: int64 [num_reqs].
        token_ids: per level below the root, int64 [num_reqs, width].
        parents: per level, int64 [num_reqs, width]: index *within the level above*,
            ascending along the row, so that siblings lie side by side.
        valid: per level, bool [num_reqs, width]; a valid node has a valid parent.
        draft_probs: float32 [num_reqs, num_rows, draft_vocab_size]. None when the
            drafts are deterministic.
        vocabulary: of ``draft_probs``' columns, see ``Draws``.
        rows: int64 [sum of widths], row of ``draft_probs`` that every node below the
            root was drawn from, level after level; left out: row ``i`` belongs to the
            children of node ``i`` counted before invalid nodes are left out.
        max_nodes: no tree has more; left out: 1 + sum of widths.
        claims: per level, float64 [num_reqs, width], how likely each node is accepted.
            None: nothing is claimed.

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
    flat_depths = torch.cat(
        [
            torch.full_like(level, depth)
            for depth, level in enumerate([root_column, *token_ids])
        ],
        dim=1,
    )

    order = torch.argsort(~flat_valid, dim=1, stable=True)[:, :max_nodes]
    new_index = flat_valid.cumsum(1) - 1
    kept = flat_valid.gather(1, order)
    old_parents = flat_parents.clamp(min=0).gather(1, order)
    new_parents = new_index.gather(1, old_parents).masked_fill(~kept, NO_NODE)
    new_parents[:, 0].fill_(NO_NODE)
    draws = None
    if draft_probs is not None:
        if rows is None:
            draw_rows = old_parents[:, 1:].clamp(max=draft_probs.shape[1] - 1)
        else:
            draw_rows = rows[order[:, 1:] - 1]
        draws = _one_draw_a_node(new_parents, draw_rows, draft_probs, vocabulary)
    tree = TreeBatch(
        token_ids=flat_tokens.gather(1, order).masked_fill(~kept, 0),
        parents=new_parents,
        depths=flat_depths.gather(1, order).masked_fill(~kept, 0),
        num_nodes=flat_valid.sum(1),
        draws=draws,
    )
    if claims is None:
        return Draft(tree)
    flat_claims = torch.nn.functional.pad(torch.cat(list(claims), dim=1), (1, 0))
    return Draft(tree, flat_claims.gather(1, order).masked_fill(~kept, 0))


def _one_draw_a_node(
    parents: Tensor, rows: Tensor, probs: Tensor, vocabulary: Tensor | None
) -> Draws:
    """Draws without replacement of which each became a node of its own.

    Args:
        parents: int64 [num_reqs, max_nodes], see ``TreeBatch``.
        rows: int64 [num_reqs, max_nodes - 1], of each draft node.
        probs: see ``Draws``.
        vocabulary: see ``Draws``.

    """
    drafts = torch.arange(1, parents.shape[1], device=parents.device)
    return Draws(
        nodes=drafts * (parents[:, 1:] >= 0),
        rows=rows,
        without_replacement=parents[:, 1:] == parents[:, :-1],
        probs=probs,
        vocabulary=vocabulary,
    )


def from_candidates(
    root_token_ids: Tensor,
    token_ids: Sequence[Tensor],
    parents: Sequence[Tensor],
    values: Sequence[Tensor],
    num_drafts: int,
    draft_probs: Tensor | None = None,
    vocabulary: Tensor | None = None,
    rows: Tensor | None = None,
) -> Draft:
    """Build the trees of the candidates with the highest values of all levels.

    Args:
        root_token_ids: int64 [num_reqs].
        token_ids: per level below the root, int64 [num_reqs, width].
        parents: per level, int64 [num_reqs, width], see ``from_levels``.
        values: per level, [num_reqs, width], no higher than the parent's; -inf where
            there is no candidate. Among equals the earlier ones are kept.
        num_drafts: how many are kept.
        draft_probs: see ``from_levels``; then the values must be such that the trees
            are lawful as they are. A tree that is cut keeps none of its draws.
        vocabulary: of ``draft_probs``' columns, see ``Draws``.
        rows: int64 [sum of widths], see ``from_levels``.

    """
    kept = highest(torch.cat(list(values), dim=1), num_drafts)
    draft = from_levels(
        root_token_ids,
        token_ids,
        parents,
        kept.split([level.shape[1] for level in values], dim=1),
        draft_probs,
        vocabulary,
        rows,
        max_nodes=1 + num_drafts,
    )
    tree = draft.tree
    if tree.draws is None:
        return draft
    draws = replace(tree.draws, min_nodes=tree.max_nodes)
    return replace(draft, tree=replace(tree, draws=draws))


def highest(values: Tensor, count: int, limits: Tensor | None = None) -> Tensor:
    """Mark the ``count`` highest of each row that are not -inf, bool, same shape.

    Among equals the earlier ones are marked; ``limits`` int64 [num_rows] may say for
    each row that fewer are.
    """
    possible = values > -torch.inf
    if limits is None and values.shape[1] <= count:
        return possible
    best = values.sort(dim=1, descending=True, stable=True).indices[:, :count]
    marks = torch.ones_like(best, dtype=torch.bool)
    if limits is not None:
        marks = torch.arange(best.shape[1], device=best.device) < limits[:, None]
    return torch.zeros_like(possible).scatter_(1, best, marks) & possible


def from_draws(
    root_token_ids: Tensor,
    token_ids: Sequence[Tensor],
    parents: Sequence[Tensor],
    rows: Sequence[Tensor],
    probs: Tensor,
    vocabulary: Tensor | None = None,
) -> TreeBatch:
    """Build the trees from independent draws: siblings that are equal are one node.

    Args:
        root_token_ids: int64 [num_reqs].
        token_ids: per level below the root, int64 [num_reqs, width].
        parents: per level, int64 [num_reqs, width]: index within the *draws* of the
            level above (0 in the first level). Draws of one node are tried in the
            order given here.
        rows: per level, int64 [num_reqs, width], row of ``probs`` drawn from.
        probs: float32 [num_reqs, num_rows, draft_vocab_size].
        vocabulary: of ``probs``' columns, see ``Draws``.

    """
    num_reqs, device = root_token_ids.shape[0], root_token_ids.device
    max_nodes = 1 + sum(level.shape[1] for level in token_ids)
    tokens = torch.zeros((num_reqs, max_nodes), dtype=torch.int64, device=device)
    tokens[:, 0] = root_token_ids
    node_parents = torch.full_like(tokens, NO_NODE)
    depths = torch.zeros_like(tokens)
    num_nodes = torch.ones_like(root_token_ids)
    above = torch.zeros_like(root_token_ids)[:, None]
    draw_nodes, draw_rows = [], []
    for depth, (drawn, parent, row) in enumerate(
        zip(token_ids, parents, rows, strict=True), start=1
    ):
        parent_node, order = above.gather(1, parent).sort(dim=1, stable=True)
        drawn, row = drawn.gather(1, order), row.gather(1, order)
        node, is_new = merge_equal(parent_node, drawn, num_nodes)
        num_nodes = num_nodes + is_new.sum(1)
        tokens.scatter_(1, node, drawn)
        node_parents.scatter_(1, node, parent_node)
        depths.scatter_(1, node, depth)
        draw_nodes.append(node)
        draw_rows.append(row)
        above = torch.zeros_like(node).scatter(1, order, node)
    nodes = torch.cat(draw_nodes, dim=1)
    draws = Draws(
        nodes=nodes,
        rows=torch.cat(draw_rows, dim=1),
        without_replacement=torch.zeros_like(nodes, dtype=torch.bool),
        probs=probs,
        vocabulary=vocabulary,
    )
    return TreeBatch(tokens, node_parents, depths, num_nodes, draws)


def merge_equal(
    parents: Tensor, tokens: Tensor, num_nodes: Tensor
) -> tuple[Tensor, Tensor]:
    """Number the nodes of one level's draws, equal siblings alike.

    Args:
        parents: int64 [num_reqs, width], ascending.
        tokens: int64 [num_reqs, width].
        num_nodes: int64 [num_reqs], nodes above this level.

    Returns:
        the node of each draw, int64 [num_reqs, width], and whether the draw is the
        first of its node, bool.

    """
    first = first_equal(parents, tokens)
    columns = torch.arange(tokens.shape[1], device=tokens.device)
    is_new = first == columns
    number = is_new.cumsum(1) - 1 + num_nodes[:, None]
    return number.gather(1, first), is_new


def first_equal(parents: Tensor, tokens: Tensor) -> Tensor:
    """First column with the same parent and token, int64 [num_reqs, width]."""
    equal = (parents[:, :, None] == parents[:, None]) & (
        tokens[:, :, None] == tokens[:, None]
    )
    return equal.int().argmax(dim=2)


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
    )
