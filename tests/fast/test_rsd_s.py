"""RSD-S: its trees follow stochastic beam search, and its Gumbel values their law."""

from __future__ import annotations

from collections.abc import Callable
from decimal import Decimal, localcontext
from typing import Any
from unittest.mock import patch

import pytest
import torch
from scipy.stats import chi2
from torch import Tensor

from tests.fast.drafting import propose
from tests.fast.enumeration import ALMOST_ONE, NOTICEABLE, rand
from tests.fast.languages import (
    LanguageDraft,
    PlainSampling,
    plain_sampling,
    random_tables,
)
from tests.fast.wrong_proposers import MODULES, WRONG_PROPOSERS
from tests.reference.proposers import (
    gumbel,
    gumbel_top_k,
    rsd_s_reference,
    truncate,
)
from tests.tiers import cases
from vllm_treespec.proposers import RsdS
from vllm_treespec.sampling.draws import draw_without_replacement, truncated_gumbel
from vllm_treespec.trees.tree import TreeBatch

# A right program fails one chi-square test in a million; wrong ones are far beyond.
LUCK = 1e-6


# The truncated Gumbel


def truncation_error(function: Callable[[Tensor, Tensor, Tensor], Tensor]) -> float:
    """Largest error against the inverse distribution function at 60 digits.

    P(G <= g | G <= bound) = exp(exp(location - bound) - exp(location - g)).
    """
    worst = 0.0
    for distance in (-1e3, -100.0, -37.0, -5.0, -0.1, 0.0, 0.1, 5.0, 37.0, 100.0, 1e3):
        for bound in (-40.0, 0.0, 2.5):
            for uniform in (1e-300, 1e-12, 0.1, 0.5, 0.9, 1 - 1e-9, ALMOST_ONE):
                location = bound + distance
                arguments = (location, bound, uniform)
                inputs = (torch.tensor(a, dtype=torch.float64) for a in arguments)
                found = float(function(*inputs))
                with localcontext() as context:
                    context.prec = 60
                    place, top, u = map(Decimal, arguments)
                    exact = float(place - ((place - top).exp() - u.ln()).ln())
                scale = max(1.0, abs(location), abs(exact))
                worst = max(worst, abs(found - exact) / scale)
    return worst


def test_truncated_gumbel_inverts_its_distribution_function() -> None:
    """Red when the truncated Gumbel loses its law or its precision far from it."""
    assert truncation_error(truncated_gumbel) < 1e-14


def test_wrong_truncations_are_noticed() -> None:
    """Red when a Gumbel cut off at the bound would pass for a conditioned one."""

    def cut_off(location: Tensor, bound: Tensor, uniforms: Tensor) -> Tensor:
        return torch.minimum(location + gumbel(uniforms), bound)

    def naive(location: Tensor, bound: Tensor, uniforms: Tensor) -> Tensor:
        return location - ((location - bound).exp() - uniforms.log()).log()

    assert not truncation_error(cut_off) < NOTICEABLE
    assert not truncation_error(naive) < NOTICEABLE


def test_truncated_gumbel_at_the_edges() -> None:
    """Red when a token without mass, or a uniform of 0, gives NaN or a higher value."""
    nothing = torch.tensor([-torch.inf] * 2, dtype=torch.float64)
    bound = torch.tensor([0.0, -torch.inf], dtype=torch.float64)
    assert truncated_gumbel(nothing, bound, torch.full_like(bound, 0.5)).equal(nothing)
    bound = rand(1000, seed=1) * 80 - 40
    for distance in (-1e3, -30.0, 0.0, 30.0, 1e3):
        # Far above the bound only rounding is left; no proposer gets there.
        slack = 0.0 if distance <= 30 else 1e-12
        for uniform in (0.0, 0.5, ALMOST_ONE):
            uniforms = torch.full_like(bound, uniform)
            value = truncated_gumbel(bound + distance, bound, uniforms)
            assert bool((value <= bound + slack).all())
            assert bool(value.isfinite().all())


def test_reference_truncation() -> None:
    """Red when the reference's stable form leaves equation 10."""
    bound = rand(50, 4, seed=2) * 6 - 3
    perturbed = rand(50, 4, 6, seed=3) * 12 - 8
    perturbed[:, :, 5] = -torch.inf
    peak = perturbed.amax(-1, keepdim=True)
    naive = -torch.log(
        torch.exp(-bound[..., None]) - torch.exp(-peak) + torch.exp(-perturbed)
    )
    assert torch.allclose(truncate(bound, perturbed), naive, atol=1e-11, rtol=0)
    far = truncate(bound, perturbed * 1e3)
    assert torch.allclose(far.amax(-1), bound, atol=1e-9, rtol=0)
    assert not bool(far.isnan().any())


# Chi-square


def same_law(first: Tensor, second: Tensor) -> float:
    """p-value of two samples of rows being from one law."""
    rows, cell = torch.cat([first, second]).unique(dim=0, return_inverse=True)
    counts = torch.stack(
        [
            torch.bincount(part, minlength=len(rows)).double()
            for part in cell.split([len(first), len(second)])
        ]
    )
    rare = counts.sum(0) < 20
    counts = torch.cat([counts[:, ~rare], counts[:, rare].sum(1, keepdim=True)], dim=1)
    counts = counts[:, counts.sum(0) > 0]
    expected = counts.sum(1, keepdim=True) * counts.sum(0) / counts.sum()
    statistic = ((counts - expected).square() / expected).sum()
    return float(chi2.sf(float(statistic), counts.shape[1] - 1))


def tree_rows(tree: TreeBatch) -> Tensor:
    """The whole tree as one row, int64 [num_reqs, 2 * max_nodes]."""
    return torch.cat([tree.token_ids * tree.is_node(), tree.parents], dim=1)


def two_samples(
    vocab_size: int, beam_width: int, kind: str, count: int
) -> tuple[Tensor, Tensor]:
    """Trees of the proposer and of full-vocabulary stochastic beam search."""
    draft, _ = random_tables(kind, vocab_size, 2)
    proposer, sampling = RsdS(beam_width, 2), plain_sampling(count)
    fast = propose(
        proposer, draft, rand(count, proposer.sizes.num_uniforms, seed=4), sampling
    )
    noise = [
        gumbel(rand(count, width, vocab_size, seed=5 + width))
        for width in (1, beam_width)
    ]
    slow = rsd_s_reference(
        LanguageDraft(draft, count), fast.token_ids[:, 0], sampling, beam_width, noise
    )
    return tree_rows(fast), tree_rows(slow)


@pytest.mark.parametrize("kind", cases(["random", "zeros"], quick=["random"]))
@pytest.mark.parametrize(
    ("vocab_size", "beam_width"), cases([(3, 2), (4, 2), (3, 3)], quick=[(3, 2)])
)
def test_trees_follow_stochastic_beam_search(
    vocab_size: int, beam_width: int, kind: str
) -> None:
    """Red when drawing values from the highest down is not the paper's beam search."""
    assert same_law(*two_samples(vocab_size, beam_width, kind, 60_000)) > LUCK


@pytest.mark.parametrize(
    "wrong",
    [
        *(make for name, (_, make) in WRONG_PROPOSERS.items() if "rsd_s" in name),
        lambda: patch.object(
            MODULES["rsd_s"], "truncated_gumbel", lambda at, _, u: at + gumbel(u)
        ),
    ],
)
def test_wrong_trees_are_noticed(wrong: Callable[[], Any]) -> None:
    """Red when the comparison could no longer see another law of trees."""
    with wrong():
        assert same_law(*two_samples(3, 2, "random", 20_000)) < LUCK


def test_gumbel_top_k_draws_without_replacement() -> None:
    """Red when inversion and Gumbel-top-k stop to have one law and one order."""
    law = random_tables("random", 5, 0)[0].table[:1].expand(60_000, -1)
    drawn, valid = draw_without_replacement(law, rand(len(law), 3, seed=6))
    assert bool(valid.all())
    noise = gumbel(rand(*law.shape, seed=7))
    assert same_law(drawn, gumbel_top_k(law.log(), 3, noise)) > LUCK
    assert same_law(drawn.flip(1), gumbel_top_k(law.log(), 3, noise)) < LUCK


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_beam_may_be_wider_than_the_vocabulary(temperature: float) -> None:
    """Red when a beam with empty places draws children below them."""
    draft, _ = random_tables("random", 3, 2)
    proposer, count = RsdS(5, 2), 50
    sampling = PlainSampling(
        torch.full((count,), temperature), all_random=temperature > 0
    )
    uniforms = rand(count, proposer.sizes.num_uniforms)
    tree = propose(proposer, draft, uniforms, sampling)
    assert tree.num_nodes.tolist() == [1 + 3 + 5] * count
    for row in draft.prefixes(tree).tolist():
        assert len(set(row)) == tree.max_nodes - 2
