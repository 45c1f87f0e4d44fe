"""Twin of ``vllm_treespec.scorers.recursive_rejection``: the walk, readable.

It scores one tree at a time, one draw at a time, in float64.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vllm_treespec.scorers.base import ScorerOutput, TargetLogits, empty_path
from vllm_treespec.trees.tree import TreeBatch


def recursive_rejection_reference(
    tree: TreeBatch, target: TargetLogits, uniforms: Tensor
) -> ScorerOutput:
    """Do what ``recursive_rejection`` does, request by request.

    Args:
        tree: drafts with ``draws``.
        target: the target's logits at the nodes.
        uniforms: float64 [num_reqs, at least 1 + max_draws] in [0, 1).

    """
    path = empty_path(tree)
    num_accepted = torch.zeros(tree.num_reqs, dtype=torch.int64)
    next_tokens = torch.zeros(tree.num_reqs, dtype=torch.int64)
    for req in range(tree.num_reqs):
        accepted, residual = verify(tree, target, req, uniforms[req])
        path[req, : len(accepted)] = torch.tensor(accepted, dtype=torch.int64)
        num_accepted[req] = len(accepted)
        next_tokens[req] = invert(residual, float(uniforms[req, 0]))
    return ScorerOutput(path, num_accepted, next_tokens)


def verify(
    tree: TreeBatch, target: TargetLogits, req: int, uniforms: Tensor
) -> tuple[list[int], Tensor]:
    """Walk down one tree (arXiv 2402.14160, algorithms 1 and 6).

    Letters there: draft distribution p = draft, target distribution q = residual.

    Returns:
        the accepted nodes from the top, and the distribution of the next token,
        float64 [vocab_size]: the target's at a leaf, else the last residual.

    """
    draws = tree.draws
    assert draws is not None
    accepted: list[int] = []
    only = torch.tensor([req])
    while True:
        node = accepted[-1] if accepted else 0
        tries = draws_below(tree, req, node)
        residual = target.probs(only, torch.tensor([node]))[0].double()
        if not tries:
            return accepted, residual
        draft = torch.empty(0)
        token = -1
        for i in tries:
            if bool(draws.without_replacement[req, i]):
                draft = without(draft, token)
            else:
                row = draws.rows[req, i : i + 1]
                draft = draws.probs_of(only, row, len(residual))[0].double()
            child = int(draws.nodes[req, i])
            token = int(tree.token_ids[req, child])
            threshold = min(1.0, float(residual[token] / draft[token]))
            if float(uniforms[1 + i]) < threshold:
                accepted.append(child)
                break
            residual = normalised_positive_part(residual - draft, residual)
        else:
            return accepted, residual


def draws_below(tree: TreeBatch, req: int, node: int) -> list[int]:
    """Draws of a node's children, in draw order."""
    assert tree.draws is not None
    nodes, parents = tree.draws.nodes[req].tolist(), tree.parents[req].tolist()
    return [i for i, child in enumerate(nodes) if child and parents[child] == node]


def normalised_positive_part(difference: Tensor, if_empty: Tensor) -> Tensor:
    """Equation 2's Norm[[.]+]; ``if_empty`` where nothing is positive."""
    positive = difference.clamp(min=0)
    mass = positive.sum()
    return positive / mass if mass > 0 else if_empty


def without(draft: Tensor, token: int) -> Tensor:
    """The draft distribution after its token has been drawn."""
    rest = draft.clone()
    rest[token] = 0
    mass = rest.sum()
    return rest / mass if mass > 0 else rest


def invert(probs: Tensor, uniform: float) -> int:
    """The token at whose step the cumulative distribution passes ``uniform``."""
    cumulative = probs.cumsum(0)
    return int((cumulative <= uniform * cumulative[-1]).sum())
