"""Exact acceptance rates of the rules at one level of a tree, for plots and tests."""

from __future__ import annotations

import torch
from torch import Tensor

from benchmarks.paper.optimal_transport import transport_plan
from vllm_treespec.scorers.base import normalised
from vllm_treespec.scorers.k_seq import expected_tries, optimal_division_factor


def acceptance_rate(
    rule_name: str, draft: Tensor, target: Tensor, num_draws: int
) -> float:
    """Probability that one of a node's draws is accepted.

    The draws are independent, but for ``recursive_rejection`` without replacement.

    Args:
        rule_name: ``multi_round``, ``k_seq``, ``optimal_transport`` or
            ``recursive_rejection``.
        draft: float64 [vocab_size], distribution of the first draw.
        target: float64 [vocab_size].
        num_draws: number of draws K.

    Raises:
        KeyError: for another rule.

    """
    rate = RATES[rule_name]
    return rate(draft.double(), target.double(), num_draws)


def multi_round_rate(draft: Tensor, target: Tensor, num_draws: int) -> float:
    """One minus the chance that all rounds reject; rounds do not know the tokens."""
    rejected = 1.0
    for _ in range(num_draws):
        rejected *= 1 - float(torch.minimum(draft, target).sum())
        target = normalised(target - draft, target)
    return 1 - rejected


def k_seq_rate(draft: Tensor, target: Tensor, num_draws: int) -> float:
    """The chance of K draws that each have the same chance."""
    draft, target, counts = draft[None], target[None], torch.tensor([num_draws])
    factor = optimal_division_factor(draft, target, counts, halvings=60)
    rate = torch.minimum(draft, target / factor[:, None]).sum(dim=1)
    return float(rate * expected_tries(rate, counts))


def optimal_transport_rate(draft: Tensor, target: Tensor, num_draws: int) -> float:
    """The optimum of the linear programme."""
    plan = transport_plan(tuple(draft.tolist()), tuple(target.tolist()), num_draws)
    return plan.acceptance_rate


def recursive_rejection_rate(draft: Tensor, target: Tensor, num_draws: int) -> float:
    """Sum over all draws without replacement, one level of recursion a draw."""
    if num_draws == 0 or float(draft.sum()) == 0:
        return 0.0
    accepted = torch.minimum(draft, target)
    rate = float(accepted.sum())
    residual = normalised(target - draft, target)
    for token in (draft > accepted).nonzero()[:, 0].tolist():
        rest = draft.index_fill(0, torch.tensor([token]), 0.0)
        rest = normalised(rest)
        rejected = float(draft[token] - accepted[token])
        rate += rejected * recursive_rejection_rate(rest, residual, num_draws - 1)
    return rate


RATES = {
    "multi_round": multi_round_rate,
    "k_seq": k_seq_rate,
    "optimal_transport": optimal_transport_rate,
    "recursive_rejection": recursive_rejection_rate,
}
