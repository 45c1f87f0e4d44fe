"""Optimal transport with membership cost: the best that K draws allow, toy sizes."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from math import prod

import numpy as np
import torch
from scipy.optimize import linprog
from scipy.sparse import coo_array
from torch import Tensor

from vllm_treespec.scorers.base import ScorerOutput, TargetLogits
from vllm_treespec.scorers.independent_draws import walk_independent_draws
from vllm_treespec.trees.tree import TreeBatch


@dataclass(frozen=True)
class TransportPlan:
    """The best joint law of K independent draws and the token to emit.

    ``accepted[draws, y]`` is the mass on which ``y``, one of the ``draws``, is
    emitted; draws are written as tuples of tokens. On what is left of the draws'
    mass a token is drawn from ``rest``, independently of them.
    """

    # (draws, y) -> mass
    accepted: dict[tuple[tuple[int, ...], int], float]
    rest: tuple[float, ...]

    @property
    def acceptance_rate(self) -> float:
        """Probability that the emitted token is one of the draws."""
        return sum(self.accepted.values())


@lru_cache(maxsize=1024)
def transport_plan(
    draft: tuple[float, ...], target: tuple[float, ...], num_draws: int
) -> TransportPlan:
    """Solve the linear programme of arXiv 2310.15141 (OTM) for one node.

    Its vocab_size ** (K + 1) variables are cut to those with y among the draws: the
    objective counts no others, and whatever mass is left of the draws and of the
    target can be matched in any way. Maximise the accepted mass, at most the draws'
    probability for each of their outcomes, at most the target's for each token.

    Args:
        draft: p, the distribution of each draw.
        target: q.
        num_draws: K.

    """
    outcomes = list(product(range(len(draft)), repeat=num_draws))
    pairs = [(i, y) for i, drawn in enumerate(outcomes) for y in sorted(set(drawn))]
    of_outcome = np.array([i for i, _ in pairs])
    of_token = np.array([y for _, y in pairs]) + len(outcomes)
    columns = np.arange(len(pairs))
    limits = coo_array(
        (
            np.ones(2 * len(pairs)),
            (np.concatenate([of_outcome, of_token]), np.tile(columns, 2)),
        )
    )
    mass = [prod(draft[x] for x in drawn) for drawn in outcomes]
    solution = linprog(
        -np.ones(len(pairs)), A_ub=limits, b_ub=[*mass, *target], method="highs-ds"
    )
    if not solution.success:
        raise RuntimeError(f"no transport plan: {solution.message}")
    accepted = {
        (outcomes[i], y): float(x) for (i, y), x in zip(pairs, solution.x, strict=True)
    }
    rest = list(target)
    for (_, y), x in accepted.items():
        rest[y] = max(rest[y] - x, 0.0)
    return TransportPlan(accepted, tuple(rest))


def optimal_transport_rate(draft: Tensor, target: Tensor, num_draws: int) -> float:
    """Acceptance rate of the best plan for one node; laws are float64 [vocab_size]."""
    plan = transport_plan(tuple(draft.tolist()), tuple(target.tolist()), num_draws)
    return plan.acceptance_rate


def optimal_transport(
    tree: TreeBatch, target: TargetLogits, uniforms: Tensor
) -> ScorerOutput:
    """Walk down each tree, emitting at each node what the best plan says.

    Lossless (arXiv 2310.15141, OTM), and no rule for independent draws accepts
    more at one level. One linear programme a node of vocab_size ** K outcomes: for
    toy sizes only.

    Args:
        tree: drafts with ``draws``, independent and from one distribution a node.
        target: the target's logits at the nodes.
        uniforms: float64 [num_reqs, at least 1 + max_draws] in [0, 1).

    Raises:
        ValueError: when draws of one node are not independent or come from several
            distributions.

    """
    return walk_independent_draws(tree, target, uniforms, judge)


def judge(
    draft: Tensor, target: Tensor, tokens: Tensor, counts: Tensor
) -> tuple[Tensor, Tensor]:
    """Chances of draws and the law after their rejection; see ``Judge``."""
    chances = torch.zeros(tokens.shape, dtype=torch.float64)
    rest = torch.empty(target.shape, dtype=torch.float64)
    for row, count in enumerate(counts.tolist()):
        drawn = tuple(tokens[row, :count].tolist())
        p, q = tuple(draft[row].tolist()), tuple(target[row].tolist())
        plan = transport_plan(p, q, count)
        left = prod(p[x] for x in drawn)
        for i, y in enumerate(drawn):
            # A repeat adds nothing: its token's share went to the first.
            share = plan.accepted[drawn, y] if y not in drawn[:i] else 0.0
            chances[row, i] = share / left if left > 0 else 0.0
            left -= share
        law = plan.rest if sum(plan.rest) > 0 else q
        rest[row] = torch.tensor(law, dtype=torch.float64)
    return chances, rest
