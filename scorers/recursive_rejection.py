"""Recursive rejection sampling: one rule for RSD, SD and multi-round draws."""

from __future__ import annotations

import torch
from torch import Tensor

from vllm_treespec.sampling.draws import draw
from vllm_treespec.scorers.base import (
    Rule,
    ScorerOutput,
    TargetLogits,
    empty_path,
    normalised,
)
from vllm_treespec.scorers.batched import NodeDraws, score_by_node
from vllm_treespec.trees.sizes import TreeSizes
from vllm_treespec.trees.tree import (
    TreeBatch,
    first_draw,
    next_draw,
)


def recursive_rejection(
    tree: TreeBatch, target: TargetLogits, uniforms: Tensor
) -> ScorerOutput:
    """Walk down each tree, rejecting draw after draw until one is accepted.

    Lossless (arXiv 2402.14160, algorithm 1 and theorem 3.1). Letters there: draft
    distribution p = draft, target distribution q and its residuals = residual. A
    node's draws are tried in draw order: token x is accepted with probability
    min(1, q(x) / p(x)); on rejection q becomes the normalised positive part of
    q - p. A draw without replacement comes from p without the tokens that the draws
    before it took, normalised; an independent one from a distribution of its own.

    Args:
        tree: drafts with ``draws``.
        target: the target's logits at the nodes.
        uniforms: float64 [num_reqs, at least 1 + max_draws] in [0, 1): column 0 for
            the last token, column 1 + i for draw i.

    """
    draws = tree.draws
    assert draws is not None
    first, next_draws = first_draw(tree), next_draw(tree)
    reqs = torch.arange(tree.num_reqs, device=tree.token_ids.device)
    node = torch.zeros_like(reqs)
    path, num_accepted = empty_path(tree), torch.zeros_like(reqs)
    candidate = first[:, 0]
    residual = target.probs(reqs, node)
    vocab_size = residual.shape[1]
    row = draws.rows[reqs, candidate.clamp(min=0)]
    draft = draws.probs_of(reqs, row, vocab_size)
    trying = reqs[candidate >= 0]
    while trying.numel():
        tried = candidate[trying]
        child = draws.nodes[trying, tried]
        token = tree.token_ids[trying, child]
        draft_prob = draft[trying, token].double()
        accept = uniforms[trying, 1 + tried] * draft_prob < residual[trying, token]

        won, below = trying[accept], child[accept]
        node[won] = below
        path[won, num_accepted[won]] = below
        num_accepted[won] += 1
        candidate[won] = first[won, below]
        residual[won] = target.probs(won, below)

        lost, token = trying[~accept], token[~accept]
        residual[lost] = subtract(residual[lost], draft[lost])
        candidate[lost] = next_draws[lost, tried[~accept]]

        goes_on = candidate[lost] >= 0
        rest = goes_on & draws.without_replacement[lost, candidate[lost].clamp(min=0)]
        draft[lost[rest]] = drop(draft[lost[rest]], token[rest])
        fresh = torch.cat([won[candidate[won] >= 0], lost[goes_on & ~rest]])
        row = draws.rows[fresh, candidate[fresh]]
        draft[fresh] = draws.probs_of(fresh, row, vocab_size)
        trying = trying[candidate[trying] >= 0]
    next_tokens = draw(residual, uniforms[:, 0])
    return ScorerOutput(path, num_accepted, next_tokens)


def recursive_rejection_batched(
    tree: TreeBatch, target: TargetLogits, uniforms: Tensor, sizes: TreeSizes
) -> ScorerOutput:
    """Do what ``recursive_rejection`` does, for all nodes together.

    Every node's draws are tried as if the walk stood there; the accepted nodes are
    those whose ancestors were all accepted below their parents.

    Args:
        tree: drafts with ``draws``.
        target: the target's logits at the nodes.
        uniforms: float64 [num_reqs, at least 1 + max_draws] in [0, 1): column 0 for
            the last token, column 1 + i for draw i.
        sizes: the trees' bounds.

    """
    return score_by_node(tree, target, uniforms, sizes, try_draws)


def try_draws(
    tree: TreeBatch,
    target: TargetLogits,
    uniforms: Tensor,
    sizes: TreeSizes,
    reqs: Tensor,
    parents: Tensor,
) -> tuple[Tensor, Tensor]:
    """Try the draws of nodes as if the walk stood at each of them.

    Args:
        tree: drafts with ``draws``.
        target: the target's logits at the nodes.
        uniforms: float64 [num_reqs, at least 1 + max_draws] in [0, 1).
        sizes: the trees' bounds.
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
    at = NodeDraws.below(tree, uniforms, sizes, reqs, parents)
    reqs, is_tried, tokens, numbers = at.reqs, at.is_tried, at.tokens, at.numbers
    rows = draws.rows[reqs, at.tried]
    without_replacement = draws.without_replacement[reqs, at.tried]
    accepts = torch.zeros_like(is_tried)
    residual = target.probs(reqs, at.nodes)
    draft = residual
    for k in range(len(is_tried)):
        # At most so many nodes of a request have more than k draws each.
        n = num_reqs * min(width, max_draws // (k + 1))
        fresh = draws.probs_of(reqs[:n], rows[k, :n], residual.shape[1])
        if k:
            rest = drop(draft[:n], tokens[k - 1, :n])
            fresh = torch.where(without_replacement[k, :n, None], rest, fresh)
        draft, token = fresh, tokens[k, :n, None]
        draft_prob = numbers[k, :n, None] * draft.gather(1, token).double()
        accepts[k, :n, None] = draft_prob < residual[:n].gather(1, token)
        left = subtract(residual[:n], draft)
        residual[:n] = torch.where(is_tried[k, :n, None], left, residual[:n])
    below = at.first_accepted(accepts)
    return below.view(width, -1).t(), residual.view(width, num_reqs, -1)


def subtract(residual: Tensor, draft: Tensor) -> Tensor:
    """Normalised positive part of residual - draft, float32 [n, vocab_size].

    An empty difference means that both distributions are equal, where a rejection
    has probability 0 and can only come from rounding: the residual is kept.
    """
    return normalised(residual - draft, residual)


def drop(draft: Tensor, tokens: Tensor) -> Tensor:
    """The draft distribution without the given tokens, normalised again.

    Where nothing is left there is no further sibling, and zeros are returned.
    """
    rest = draft.scatter(1, tokens[:, None], 0.0)
    return normalised(rest)


RECURSIVE_REJECTION = Rule(
    "recursive_rejection", recursive_rejection, recursive_rejection_batched
)
