"""The rules for a GPU: all nodes are judged at once, and the host waits for nothing.

Same results as the walks of this package, which look only where they come by but ask
the device at every level. Here shapes and numbers of launches follow from what the
host knows, so that a CUDA graph can hold a whole rule.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from vllm_treespec.core.sampling import draw
from vllm_treespec.core.tree import (
    NO_NODE,
    TreeBatch,
    ancestor_bits,
    first_draw,
    node_bits,
    num_draws,
)
from vllm_treespec.scorers.base import ScorerOutput, TargetLogits
from vllm_treespec.scorers.recursive_rejection import drop, subtract

# Distributions that are held side by side: 256 of 128 k tokens take 128 MiB in
# float32, and are enough work to fill a device.
ROWS_AT_ONCE = 256


@dataclass(frozen=True)
class TreeShape:
    """Bounds of a batch's trees, known on the host; too large ones only cost time."""

    # levels below the root
    max_depth: int
    # draws below one node, repeats included
    max_siblings: int
    # nodes with draws below them
    max_parents: int


# From trees, the target's logits at their nodes, uniform numbers and the trees'
# bounds to accepted paths, int64 [num_reqs, max_depth], and one more token each.
AtOnceRule = Callable[[TreeBatch, TargetLogits, Tensor, TreeShape], ScorerOutput]


def score_at_once(
    tree: TreeBatch,
    target: TargetLogits,
    uniforms: Tensor,
    rule_name: str,
    shape: TreeShape,
) -> ScorerOutput:
    """Score each tree by the rule that suits its request.

    Args:
        tree: the trees.
        target: the target's logits at the nodes.
        uniforms: float64 [num_reqs, as many as the rule asks for] in [0, 1).
        rule_name: for sampled requests, a key of ``AT_ONCE``; greedy ones follow the
            target's likeliest tokens.
        shape: the trees' bounds.

    Raises:
        KeyError: for a rule that has no such form, unless all requests are greedy.

    """
    if target.sampling.all_greedy:
        return greedy_at_once(tree, target, shape)
    sampled = AT_ONCE[rule_name](tree, target, uniforms, shape)
    if target.sampling.all_random:
        return sampled
    matched, greedy = greedy_at_once(tree, target, shape), target.sampling.greedy
    return ScorerOutput(
        torch.where(greedy[:, None], matched.path, sampled.path),
        torch.where(greedy, matched.num_accepted, sampled.num_accepted),
        torch.where(greedy, matched.next_token_ids, sampled.next_token_ids),
    )


def greedy_at_once(
    tree: TreeBatch, target: TargetLogits, shape: TreeShape
) -> ScorerOutput:
    """Do what ``greedy_matching`` does.

    Args:
        tree: drafts.
        target: the target's logits at the nodes.
        shape: the trees' bounds; only the depth is looked at.

    """
    likeliest = target.logits.to(torch.float32).argmax(dim=-1)
    return follow_at_once(
        tree, likeliest[target.first_row[:, None] + nodes(tree)], shape
    )


def target_draw_at_once(
    tree: TreeBatch, target: TargetLogits, uniforms: Tensor, shape: TreeShape
) -> ScorerOutput:
    """Do what ``target_draw`` does.

    Args:
        tree: drafts; ``draws`` is not looked at.
        target: the target's logits at the nodes.
        uniforms: float64 [num_reqs, at least max_nodes] in [0, 1): column i draws the
            token after node i.
        shape: the trees' bounds; only the depth is looked at.

    """
    node = nodes(tree)
    reqs = torch.arange(tree.num_reqs, device=node.device)[:, None].expand_as(node)
    drawn = [
        draw(target.probs(req, at), uniforms[req, at])
        for req, at in zip(
            reqs.flatten().split(ROWS_AT_ONCE),
            node.flatten().split(ROWS_AT_ONCE),
            strict=True,
        )
    ]
    return follow_at_once(tree, torch.cat(drawn).view_as(node), shape)


def follow_at_once(
    tree: TreeBatch, next_tokens: Tensor, shape: TreeShape
) -> ScorerOutput:
    """Accept the longest path along which every token is the one chosen before it.

    Args:
        tree: drafts.
        next_tokens: int64 [num_reqs, max_nodes], the token chosen after each node.
        shape: the trees' bounds.

    """
    wanted = next_tokens.gather(1, tree.parents.clamp(min=0))
    kept = (tree.parents >= 0) & (tree.token_ids == wanted)
    path, num_accepted, last = accepted_path(
        ancestor_bits(tree, shape.max_depth),
        tree.depths,
        (node_bits(tree) * kept).sum(dim=1),
        shape,
    )
    return ScorerOutput(path, num_accepted, next_tokens.gather(1, last[:, None])[:, 0])


def rejection_at_once(
    tree: TreeBatch, target: TargetLogits, uniforms: Tensor, shape: TreeShape
) -> ScorerOutput:
    """Do what ``recursive_rejection`` does, and so multi-round.

    Every node's draws are tried as if the walk stood there; the accepted nodes are
    those whose ancestors were all accepted by theirs.

    Args:
        tree: drafts with ``draws``.
        target: the target's logits at the nodes.
        uniforms: float64 [num_reqs, at least 1 + max_draws] in [0, 1): column 0 for
            the last token, column 1 + i for draw i.
        shape: the trees' bounds.

    """
    parents = parents_with_draws(tree, shape)
    reqs = torch.arange(tree.num_reqs, device=parents.device)
    parts = [
        reject(tree, target, uniforms, shape, part, parents[part])
        for part in reqs.split(max(ROWS_AT_ONCE // parents.shape[1], 1))
    ]
    return ScorerOutput(
        torch.cat([part.path for part in parts]),
        torch.cat([part.num_accepted for part in parts]),
        torch.cat([part.next_token_ids for part in parts]),
    )


def parents_with_draws(tree: TreeBatch, shape: TreeShape) -> Tensor:
    """Each request's nodes with draws, those with the most first, int64.

    Returns:
        [num_reqs, at most max_parents]; nodes without draws fill the rows.

    """
    assert tree.draws is not None
    width = max(min(shape.max_parents, tree.draws.nodes.shape[1]), 1)
    order = num_draws(tree).argsort(dim=1, descending=True, stable=True)
    # The last node is a leaf: it stands in for entries that hold no node.
    leaf = (tree.num_nodes - 1).clamp(min=0)
    return torch.minimum(order[:, :width], leaf[:, None])


def reject(
    tree: TreeBatch,
    target: TargetLogits,
    uniforms: Tensor,
    shape: TreeShape,
    reqs: Tensor,
    parents: Tensor,
) -> ScorerOutput:
    """Score the trees of the requests ``reqs``; arguments as for ``judge``."""
    below, residual = judge(tree, target, uniforms, shape, reqs, parents)
    # Bit 0 is no child's: it is set where none was accepted.
    bits = (torch.ones_like(below) << below) & ~1
    ancestors = ancestor_bits(tree, shape.max_depth)[reqs]
    path, num_accepted, last = accepted_path(
        ancestors, tree.depths[reqs], bits.sum(dim=1), shape
    )
    is_last = parents == last[:, None]
    place = is_last.int().argmax(dim=1)
    columns = torch.arange(len(reqs), device=reqs.device)
    law = torch.where(
        is_last.any(dim=1, keepdim=True),
        residual[place, columns],
        target.probs(reqs, last),
    )
    return ScorerOutput(path, num_accepted, draw(law, uniforms[reqs, 0]))


def judge(
    tree: TreeBatch,
    target: TargetLogits,
    uniforms: Tensor,
    shape: TreeShape,
    reqs: Tensor,
    parents: Tensor,
) -> tuple[Tensor, Tensor]:
    """Try the draws of nodes as if the walk stood at each of them.

    Args:
        tree: drafts with ``draws``.
        target: the target's logits at the nodes.
        uniforms: float64 [num_reqs, at least 1 + max_draws] in [0, 1).
        shape: the trees' bounds.
        reqs: int64 [n].
        parents: int64 [n, width], nodes of these requests, those with the most draws
            first.

    Returns:
        the accepted child of every node, int64 [n, width], 0 where none was, and, of
        those nodes, the law of the next token, [width, n, vocab_size].

    """
    draws = tree.draws
    assert draws is not None
    num_reqs, width = parents.shape
    max_draws = draws.nodes.shape[1]
    max_tries = min(shape.max_siblings, max_draws)
    reqs, nodes = reqs.repeat(width), parents.t().flatten()
    tries = torch.arange(max_tries, device=reqs.device)[:, None]
    is_tried = tries < num_draws(tree)[reqs, nodes]
    tried = (first_draw(tree)[reqs, nodes] + tries).clamp(0, max_draws - 1)
    rows, from_rest = draws.rows[reqs, tried], draws.from_rest[reqs, tried]
    children = draws.nodes[reqs, tried]
    tokens, numbers = tree.token_ids[reqs, children], uniforms[reqs, 1 + tried]
    accepts = torch.zeros_like(is_tried)
    residual = target.probs(reqs, nodes)
    draft = residual
    for k in range(max_tries):
        # At most so many nodes of a request have more than k draws each.
        n = num_reqs * min(width, max_draws // (k + 1))
        fresh = draws.probs_of(reqs[:n], rows[k, :n], residual.shape[1])
        if k:
            rest = drop(draft[:n], tokens[k - 1, :n])
            fresh = torch.where(from_rest[k, :n, None], rest, fresh)
        draft, token = fresh, tokens[k, :n, None]
        draft_prob = numbers[k, :n, None] * draft.gather(1, token).double()
        accepts[k, :n, None] = draft_prob < residual[:n].gather(1, token)
        left = subtract(residual[:n], draft)
        residual[:n] = torch.where(is_tried[k, :n, None], left, residual[:n])
    accepts &= is_tried
    wins = accepts & (accepts.cumsum(dim=0) == 1)
    below = (children * wins).sum(dim=0)
    return below.view(width, -1).t(), residual.view(width, num_reqs, -1)


def accepted_path(
    ancestors: Tensor, depths: Tensor, kept_bits: Tensor, shape: TreeShape
) -> tuple[Tensor, Tensor, Tensor]:
    """Find the path along which every node was kept below its parent.

    Args:
        ancestors: int64 [num_reqs, max_nodes], see ``ancestor_bits``.
        depths: int64 [num_reqs, max_nodes], 0 in unused entries.
        kept_bits: int64 [num_reqs], bit i is set iff node i was kept; at most one
            child of a node is, and the root need not be.
        shape: the trees' bounds.

    Returns:
        path int64 [num_reqs, max_depth], its length and its last node, int64
        [num_reqs], 0 for the root.

    """
    accepted = (ancestors & ~(kept_bits | 1)[:, None]) == 0
    places = depths * accepted
    columns = torch.arange(depths.shape[1], device=depths.device)
    path = torch.full(
        (len(depths), max(shape.max_depth, 1) + 1), NO_NODE, device=depths.device
    )
    # Column 0 takes the root and all that was not accepted.
    path.scatter_(1, places, columns.expand_as(places))
    last = (columns * (places > 0)).amax(dim=1)
    return path[:, 1:].contiguous(), places.amax(dim=1), last


def nodes(tree: TreeBatch) -> Tensor:
    """Every entry's node, int64 [num_reqs, max_nodes]; the root in unused entries."""
    columns = torch.arange(tree.max_nodes, device=tree.token_ids.device)
    return columns * tree.is_node()


# The rules that have this form, by the names used in spec-configs.
AT_ONCE: dict[str, AtOnceRule] = {
    "recursive_rejection": rejection_at_once,
    "multi_round": rejection_at_once,
    "target_draw": target_draw_at_once,
}
