"""K-sequential selection, SpecTr's rule."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from vllm_treespec.scorers.base import Rule, ScorerOutput, TargetLogits, normalised
from vllm_treespec.scorers.batched import score_by_node
from vllm_treespec.scorers.independent_draws import (
    Judge,
    judge_draws,
    walk_independent_draws,
)
from vllm_treespec.trees.sizes import TreeSizes
from vllm_treespec.trees.tree import TreeBatch

# Halvings of [1, number of draws] at every node: each is a pass over the vocabulary,
# and the share of drafts lost to a factor that is 2**-20 too large is about 2**-20.
HALVINGS = 20

# From draft and target [n, vocab_size] and the number of draws int64 [n] to
# division factors float64 [n].
DivisionFactor = Callable[[Tensor, Tensor, Tensor], Tensor]


def optimal_division_factor(
    draft: Tensor, target: Tensor, counts: Tensor, halvings: int = HALVINGS
) -> Tensor:
    """Solve for the smallest division factor that keeps the target's law.

    arXiv 2310.15141, K-SEQ: 1 - (1 - beta(gamma))^m = gamma beta(gamma) with
    beta(gamma) = sum of min(p, q / gamma); written here as gamma = expected tries.
    The upper end of the last bracket is returned, which errs on the lossless side.

    Args:
        draft: [n, vocab_size], p.
        target: [n, vocab_size], q.
        counts: int64 [n], the number of draws m.
        halvings: how often the bracket [1, m] is halved.

    Returns:
        gamma, float64 [n] in [1, m].

    """
    factor = counts.double()
    several = (counts > 1).nonzero()[:, 0]
    if not several.numel():
        return factor
    found = halved(draft[several], target[several], counts[several], halvings)
    return factor.index_copy(0, several, found)


def halved(
    draft: Tensor, target: Tensor, counts: Tensor, halvings: int = HALVINGS
) -> Tensor:
    """The same without a look at the numbers of draws, so that the host never waits."""
    above = counts.double()
    below = torch.ones_like(above)
    for _ in range(halvings):
        middle = (below + above) / 2
        share = (1 / middle[:, None]).to(target.dtype)
        accepted = torch.minimum(draft, target * share)
        rate = accepted.sum(dim=1, dtype=torch.float64)
        enough = middle >= expected_tries(rate, counts)
        above = torch.where(enough, middle, above)
        below = torch.where(enough, below, middle)
    return above


def k_seq(
    tree: TreeBatch,
    target: TargetLogits,
    uniforms: Tensor,
    division_factor: DivisionFactor = optimal_division_factor,
) -> ScorerOutput:
    """Walk down each tree, every draw of a node having the same test.

    Lossless (arXiv 2310.15141, K-SEQ; arXiv 2402.14160, section 2). Letters in the
    latter: draft distribution p, target distribution q, division factor gamma, number
    of draws K, here m. Token x is accepted with probability
    min(1, q(x) / (gamma p(x))); after m rejections the next token's law is the
    normalised q - min(p, q / gamma) (1 - (1 - beta)^m) / beta, beta being the chance
    of one draw. A larger gamma than the optimum is lossless too and accepts less; a
    smaller one is lossy.

    Args:
        tree: drafts with ``draws``, independent and from one distribution a node.
        target: the target's logits at the nodes.
        uniforms: float64 [num_reqs, at least 1 + max_draws] in [0, 1).
        division_factor: how gamma is chosen at a node.

    Raises:
        ValueError: when draws of one node are not independent or come from several
            distributions.

    """
    return walk_independent_draws(tree, target, uniforms, make_judge(division_factor))


def make_judge(division_factor: DivisionFactor) -> Judge:
    """Make the judge of ``walk_independent_draws`` for a choice of division factor."""

    def judge(
        draft: Tensor, target: Tensor, tokens: Tensor, counts: Tensor
    ) -> tuple[Tensor, Tensor]:
        factor = division_factor(draft, target, counts)
        draft, target = draft.double(), target.double()
        accepted = torch.minimum(draft, target / factor[:, None])
        tries = expected_tries(accepted.sum(dim=1), counts)
        rest = normalised(target - accepted * tries[:, None], target)
        return accepted.gather(1, tokens) / draft.gather(1, tokens), rest

    return judge


def expected_tries(rate: Tensor, counts: Tensor) -> Tensor:
    """Mean number of draws tried, (1 - (1 - rate)^m) / rate, float64 [n].

    Args:
        rate: chance of each draw to be accepted, float64 [n].
        counts: int64 [n], the number of draws m.

    """
    rate = rate.clamp(max=1)
    any_accepted = -torch.expm1(counts * torch.log1p(-rate))
    return torch.where(rate > 0, any_accepted / rate, counts.to(rate.dtype))


def k_seq_batched(
    tree: TreeBatch, target: TargetLogits, uniforms: Tensor, sizes: TreeSizes
) -> ScorerOutput:
    """Do what ``k_seq`` does, for all nodes together.

    Args:
        tree: drafts with ``draws``, independent and from one distribution a node, which
            nobody checks here.
        target: the target's logits at the nodes.
        uniforms: float64 [num_reqs, at least 1 + max_draws] in [0, 1).
        sizes: the trees' bounds.

    """
    try_draws = partial(judge_draws, make_judge(halved))
    # in float64
    return score_by_node(tree, target, uniforms, sizes, try_draws, copies=3)


K_SEQ = Rule("k_seq", k_seq, k_seq_batched)
