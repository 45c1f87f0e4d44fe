"""The rules for a GPU: all nodes are judged at once, and the host waits for nothing.

Same results as the walks of this package, which look only where they come by but ask
the device at every level. Here shapes and numbers of launches follow from what the
host knows, so that a CUDA graph can hold a whole rule.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from vllm_treespec.sampling import draw
from vllm_treespec.scorers.base import ScorerOutput, TargetLogits
from vllm_treespec.scorers.recursive_rejection import drop, subtract
from vllm_treespec.tree import (
    NO_NODE,
    TreeBatch,
    ancestor_bits,
    first_draw,
    node_bits,
    num_draws,
)

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
        KeyError: for a rule that has no such form.

    """
    rule = AT_ONCE[rule_name]
    if target.sampling.all_greedy:
        return greedy_at_once(tree, target, shape)
    sampled = rule(tree, target, uniforms, shape)
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
    kept_bits = torch.where(kept, node_bits(tree), 0).sum(dim=1)
    path, num_accepted, last = accepted_path(tree, kept_bits, shape)
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
    tries = Tries.of(tree, shape)
    reqs = torch.arange(tree.num_reqs, device=tries.nodes.device)
    parts = [
        reject(tree, target, uniforms, shape, part, tries.select(part))
        for part in reqs.split(max(ROWS_AT_ONCE // tries.nodes.shape[1], 1))
    ]
    return ScorerOutput(
        torch.cat([part.path for part in parts]),
        torch.cat([part.num_accepted for part in parts]),
        torch.cat([part.next_token_ids for part in parts]),
    )


@dataclass(frozen=True)
class Tries:
    """Each request's nodes with draws, those with the most draws first."""

    # int64 [num_reqs, width]; nodes without draws fill the rows
    nodes: Tensor
    # int64 [num_reqs, width], number of the first draw, and how many there are
    first: Tensor
    count: Tensor

    @classmethod
    def of(cls, tree: TreeBatch, shape: TreeShape) -> Tries:
        """Find them in trees with ``draws``."""
        assert tree.draws is not None
        counts = num_draws(tree)
        width = max(min(shape.max_parents, tree.draws.nodes.shape[1]), 1)
        order = counts.argsort(dim=1, descending=True, stable=True)
        # The last node is a leaf: it stands in for entries that hold no node.
        leaf = (tree.num_nodes - 1).clamp(min=0)
        nodes = torch.minimum(order, leaf[:, None])[:, :width]
        return cls(nodes, first_draw(tree).gather(1, nodes), counts.gather(1, nodes))

    def select(self, reqs: Tensor) -> Tries:
        """Return the rows of the given requests, ``reqs`` int64 [n]."""
        return Tries(self.nodes[reqs], self.first[reqs], self.count[reqs])


def reject(
    tree: TreeBatch,
    target: TargetLogits,
    uniforms: Tensor,
    shape: TreeShape,
    reqs: Tensor,
    tries: Tries,
) -> ScorerOutput:
    """Score the trees of the requests ``reqs``, int64 [n]; ``tries`` are theirs."""
    below, residual = judge(tree, target, uniforms, shape, reqs, tries)
    bits = torch.where(below > 0, torch.ones_like(below) << below, 0)
    own = replace(tree, draws=None).select(reqs)
    path, num_accepted, last = accepted_path(own, bits.sum(dim=1), shape)

    is_last = tries.nodes == last[:, None]
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
    tries: Tries,
) -> tuple[Tensor, Tensor]:
    """Try the draws of nodes as if the walk stood at each of them.

    Args:
        tree: drafts with ``draws``.
        target: the target's logits at the nodes.
        uniforms: float64 [num_reqs, at least 1 + max_draws] in [0, 1).
        shape: the trees' bounds.
        reqs: int64 [n].
        tries: the nodes of these requests.

    Returns:
        the accepted child of every node, int64 [n, width], 0 where none was, and, of
        those nodes, the law of the next token, [width, n, vocab_size].

    """
    draws = tree.draws
    assert draws is not None
    num_reqs, width = tries.nodes.shape
    max_draws = draws.nodes.shape[1]
    reqs = reqs.repeat(width)
    first, count = tries.first.t().flatten(), tries.count.t().flatten()
    residual = target.probs(reqs, tries.nodes.t().flatten())
    below = torch.zeros_like(reqs)
    token, draft = below, residual
    for k in range(min(shape.max_siblings, max_draws)):
        # At most so many nodes of a request have more than k draws each.
        rows = slice(num_reqs * min(width, max_draws // (k + 1)))
        req, is_tried = reqs[rows], count[rows] > k
        tried = (first[rows] + k).clamp(0, max_draws - 1)
        fresh = draws.probs_of(req, draws.rows[req, tried], residual.shape[1])
        if k:
            from_rest = draws.from_rest[req, tried, None]
            fresh = torch.where(from_rest, drop(draft[rows], token[rows]), fresh)
        draft, child = fresh, draws.nodes[req, tried]
        token = tree.token_ids[req, child]
        draft_prob = draft.gather(1, token[:, None])[:, 0].double()
        target_prob = residual[rows].gather(1, token[:, None])[:, 0]
        accept = is_tried & (uniforms[req, 1 + tried] * draft_prob < target_prob)
        below[rows] = torch.where(accept & (below[rows] == 0), child, below[rows])
        left = subtract(residual[rows], draft)
        residual[rows] = torch.where(is_tried[:, None], left, residual[rows])
    return below.view(width, -1).t(), residual.view(width, num_reqs, -1)


def accepted_path(
    tree: TreeBatch, kept_bits: Tensor, shape: TreeShape
) -> tuple[Tensor, Tensor, Tensor]:
    """Find the path along which every node was kept below its parent.

    Args:
        tree: drafts.
        kept_bits: int64 [num_reqs], bit i is set iff node i was kept; at most one
            child of a node is.
        shape: the trees' bounds.

    Returns:
        path int64 [num_reqs, max_depth], its length and its last node, int64
        [num_reqs], 0 for the root.

    """
    # The root is certain: its bit counts as set.
    missing = ancestor_bits(tree, shape.max_depth) & ~(kept_bits | 1)[:, None]
    accepted = tree.is_node() & (missing == 0)
    columns = torch.arange(tree.max_nodes, device=kept_bits.device).expand_as(accepted)
    path = torch.full(
        (tree.num_reqs, max(shape.max_depth, 1) + 1), NO_NODE, device=kept_bits.device
    )
    # Column 0 takes the root and all that was not accepted.
    path.scatter_(1, torch.where(accepted, tree.depths, 0), columns)
    last = (columns * accepted).amax(dim=1)
    return path[:, 1:].contiguous(), (accepted.sum(dim=1) - 1).clamp(min=0), last


def nodes(tree: TreeBatch) -> Tensor:
    """Every entry's node, int64 [num_reqs, max_nodes]; the root in unused entries."""
    columns = torch.arange(tree.max_nodes, device=tree.token_ids.device)
    return torch.where(tree.is_node(), columns, 0)


# The rules that have this form, by the names used in spec-configs.
AT_ONCE: dict[str, AtOnceRule] = {
    "recursive_rejection": rejection_at_once,
    "multi_round": rejection_at_once,
    "target_draw": target_draw_at_once,
}
