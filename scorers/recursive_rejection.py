"""Recursive rejection sampling: the one walk behind RSD and, on a chain, SD."""

from __future__ import annotations

import torch
from torch import Tensor

from vllm_treespec.sampling import draw
from vllm_treespec.scorers.base import ScorerOutput, TargetLogits, empty_path
from vllm_treespec.tree import TreeBatch, first_child, next_sibling


def num_uniforms(max_nodes: int) -> int:
    """Uniform numbers that scoring one request takes: one a node, one to draw."""
    return max_nodes + 1


def recursive_rejection(
    tree: TreeBatch, target: TargetLogits, uniforms: Tensor
) -> ScorerOutput:
    """Walk down each tree, rejecting sibling after sibling until one is accepted.

    Lossless (arXiv 2402.14160, algorithm 1 and theorem 3.1). Letters there: draft
    distribution p = draft, target distribution q and its residuals = residual. A
    node's children are tried in draw order: child x is accepted with probability
    min(1, q(x) / p(x)); on rejection q becomes the normalised positive part of
    q - p and, for draws without replacement, p drops x and is normalised again.

    Args:
        tree: drafts with ``draft_probs``.
        target: the target's logits at the nodes.
        uniforms: float64 [num_reqs, at least max_nodes + 1] in [0, 1).

    """
    assert tree.draft_probs is not None
    children, siblings = first_child(tree), next_sibling(tree)
    reqs = torch.arange(tree.num_reqs, device=tree.token_ids.device)
    node = torch.zeros_like(reqs)
    path, num_accepted = empty_path(tree), torch.zeros_like(reqs)
    candidate = children[:, 0]
    residual = target.probs(reqs, node)
    draft = tree.draft_probs[reqs, tree.draft_rows[:, 0]]
    trying = reqs[candidate >= 0]
    while trying.numel():
        tried = candidate[trying]
        token = tree.token_ids[trying, tried]
        draft_prob = draft[trying, token].double()
        accept = uniforms[trying, tried] * draft_prob < residual[trying, token]

        won, below = trying[accept], tried[accept]
        node[won] = below
        path[won, num_accepted[won]] = below
        num_accepted[won] += 1
        candidate[won] = children[won, below]
        residual[won] = target.probs(won, below)
        inner, at = won[candidate[won] >= 0], below[candidate[won] >= 0]
        draft[inner] = tree.draft_probs[inner, tree.draft_rows[inner, at]]

        lost, token = trying[~accept], token[~accept]
        residual[lost] = subtract(residual[lost], draft[lost])
        if not tree.with_replacement:
            draft[lost] = drop(draft[lost], token)
        candidate[lost] = siblings[lost, tried[~accept]]
        trying = trying[candidate[trying] >= 0]
    next_tokens = draw(residual, uniforms[:, tree.max_nodes])
    return ScorerOutput(path, num_accepted, next_tokens)


def subtract(residual: Tensor, draft: Tensor) -> Tensor:
    """Normalised positive part of residual - draft, float32 [n, vocab_size].

    An empty difference means that both distributions are equal, where a rejection
    has probability 0 and can only come from rounding: the residual is kept.
    """
    difference = (residual - draft).clamp_(min=0)
    mass = difference.sum(dim=-1, keepdim=True)
    return torch.where(mass > 0, difference / mass.clamp(min=1e-38), residual)


def drop(draft: Tensor, tokens: Tensor) -> Tensor:
    """The draft distribution without the given tokens, normalised again.

    Where nothing is left there is no further sibling, and zeros are returned.
    """
    rest = draft.scatter(1, tokens[:, None], 0.0)
    return rest / rest.sum(dim=-1, keepdim=True).clamp(min=1e-38)
