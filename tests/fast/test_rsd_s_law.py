"""The law that RSD-S draws and emits: exactly where it can be, else by chi-square.

Which tokens the beam holds and how many children a node gets are decided by the
proposer's two kinds of uniforms. With those of the Gumbel values held fixed, every
token draw can be enumerated, and the emitted law is the target's already: whether a
node has a k-th child depends on its earlier children, never on which token comes next.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from decimal import Decimal, localcontext
from typing import Any
from unittest.mock import patch

import pytest
import torch
from scipy.stats import chi2
from torch import Tensor

from tests.fast.beam_trees import all_rsd_s_trees, rand
from tests.fast.chi_square import emitted_p_value
from tests.fast.enumeration import (
    ALMOST_ONE,
    Weighted,
    law_error,
    propose,
)
from tests.fast.languages import (
    Language,
    LanguageDraft,
    PlainSampling,
    plain_sampling,
    random_tables,
)
from tests.fast.wrong_scorers import RSD_S, WRONG_SCORERS, siblings_by_probability
from tests.reference.proposers import (
    gumbel,
    gumbel_top_k,
    rsd_s_reference,
    truncate,
)
from tests.tiers import cases
from vllm_treespec.proposers import RsdS
from vllm_treespec.proposers.rsd_s import select_beam
from vllm_treespec.sampling.draws import draw_without_replacement, truncated_gumbel
from vllm_treespec.scorers import recursive_rejection
from vllm_treespec.trees.tree import TreeBatch

EXACT = 1e-12
NOTICEABLE = 1e-3
# A right program fails one chi-square test in a million; wrong ones are far beyond.
LUCK = 1e-6


# Exact, given the Gumbel uniforms


@pytest.mark.parametrize(
    ("kind", "vocab_size", "beam_width"),
    cases(
        [
            (kind, *sizes)
            for kind in ("random", "zeros", "equal", "disjoint", "top_k")
            for sizes in ((3, 2), (4, 2), (3, 3))
        ],
        quick=[
            ("random", 3, 3),
            *((kind, 3, 2) for kind in ("zeros", "equal", "disjoint", "top_k")),
        ],
    ),
)
def test_emitted_law_is_the_targets(
    kind: str, vocab_size: int, beam_width: int
) -> None:
    """Red when the beam's choice of nodes depends on tokens it must not look at."""
    draft, target = random_tables(kind, vocab_size, 2)
    for seed in range(5):
        drawn = all_rsd_s_trees(draft, beam_width, seed)
        assert law_error(recursive_rejection, drawn, target) < EXACT


@pytest.mark.parametrize("num_nodes", [2, 3, 4, 5, 6])
def test_law_of_cut_trees(num_nodes: int) -> None:
    """Red when a beam that the scheduler has cut is no longer verified losslessly."""
    draft, target = random_tables("random", 3, 2)
    drawn = all_rsd_s_trees(draft, 3, seed=0)
    tree = drawn.tree.cut(torch.full_like(drawn.tree.num_nodes, num_nodes))
    assert law_error(recursive_rejection, Weighted(tree, drawn.weights), target) < EXACT


def theorem_error(drawn: Weighted, draft: Language) -> float:
    """How far siblings are from draws without replacement (theorem 3.2).

    For every node, given all that is above it: among the trees in which it has a
    k-th child, the k-th child's token follows the draft distribution without the
    first k - 1 tokens.
    """
    tree, mass = drawn.tree, defaultdict[tuple[Any, ...], float](float)
    prefixes, parents = draft.prefixes(tree).tolist(), tree.parents.tolist()
    tokens, depths = tree.token_ids.tolist(), tree.depths.tolist()
    for req, weight in enumerate(drawn.weights.tolist()):
        for node in range(int(tree.num_nodes[req])):
            own = [
                t for t, p in zip(tokens[req], parents[req], strict=True) if p == node
            ]
            above = [
                p
                for p, d in zip(prefixes[req], depths[req], strict=True)
                if d <= depths[req][node]
            ]
            for k in range(1, len(own) + 1):
                mass[(tuple(above), node, prefixes[req][node], tuple(own[:k]))] += (
                    weight
                )
    with_child = defaultdict[tuple[Any, ...], float](float)
    for (*context, siblings), weight in mass.items():
        with_child[(*context, siblings[:-1])] += weight
    error = 0.0
    for (*context, siblings), weight in mass.items():
        law = draft.table[context[-1]]
        left = 1 - sum(float(law[t]) for t in siblings[:-1])
        expected = float(law[siblings[-1]]) / left
        found = weight / with_child[(*context, siblings[:-1])]
        error = max(error, abs(found - expected))
    return error


@pytest.mark.parametrize("kind", cases(["random", "zeros", "top_k"], quick=["zeros"]))
@pytest.mark.parametrize(("vocab_size", "beam_width"), [(4, 2), (3, 3)])
def test_siblings_are_draws_without_replacement(
    kind: str, vocab_size: int, beam_width: int
) -> None:
    """Red when theorem 3.2 stops to hold for the trees that the proposer draws."""
    draft, _ = random_tables(kind, vocab_size, 2)
    for seed in range(5):
        drawn = all_rsd_s_trees(draft, beam_width, seed)
        assert theorem_error(drawn, draft) < EXACT


def select_likeliest(
    perturbed: Tensor, beam_width: int, columns: Tensor, log_probs: Tensor, sure: Tensor
) -> tuple[Tensor, ...]:
    """``select_beam`` by log probability: looks at the tokens it selects."""
    return select_beam(log_probs, beam_width, columns, log_probs, sure)


WRONG_PROPOSERS: dict[str, tuple[str, Callable[..., Any]]] = {
    "siblings by probability": ("draw_children", siblings_by_probability),
    "beam by probability": ("select_beam", select_likeliest),
}


@pytest.mark.parametrize("name", WRONG_PROPOSERS)
def test_wrong_proposers_are_noticed(name: str) -> None:
    """Red when the checks of this file could no longer see a broken draw."""
    draft, target = random_tables("random", 3, 2)
    with patch.object(RSD_S, *WRONG_PROPOSERS[name]):
        drawn = all_rsd_s_trees(draft, 2, seed=0)
        assert theorem_error(drawn, draft) > NOTICEABLE
        assert law_error(recursive_rejection, drawn, target) > NOTICEABLE


@pytest.mark.parametrize("name", WRONG_SCORERS)
def test_wrong_scorers_are_noticed(name: str) -> None:
    """Red when the exact check could no longer see a lossy scorer."""
    draft, target = random_tables("random", 4, 2)
    drawn = all_rsd_s_trees(draft, 2, seed=0)
    assert law_error(WRONG_SCORERS[name], drawn, target) > NOTICEABLE


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
        proposer, draft, sampling, rand(count, proposer.sizes.num_uniforms, seed=4)
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


@pytest.mark.parametrize("name", [*WRONG_PROPOSERS, "values not truncated"])
def test_wrong_trees_are_noticed(name: str) -> None:
    """Red when the comparison could no longer see another law of trees."""
    wrong = {
        **WRONG_PROPOSERS,
        "values not truncated": ("truncated_gumbel", lambda at, _, u: at + gumbel(u)),
    }
    with patch.object(RSD_S, *wrong[name]):
        assert same_law(*two_samples(3, 2, "random", 20_000)) < LUCK


def test_gumbel_top_k_draws_without_replacement() -> None:
    """Red when inversion and Gumbel-top-k stop to have one law and one order."""
    law = random_tables("random", 5, 0)[0].table[:1].expand(60_000, -1)
    drawn, valid = draw_without_replacement(law, rand(len(law), 3, seed=6))
    assert bool(valid.all())
    noise = gumbel(rand(*law.shape, seed=7))
    assert same_law(drawn, gumbel_top_k(law.log(), 3, noise)) > LUCK
    assert same_law(drawn.flip(1), gumbel_top_k(law.log(), 3, noise)) < LUCK


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("vocab_size", "beam_width", "depth", "count"),
    [(5, 3, 2, 400_000), (4, 2, 3, 400_000), (5, 4, 3, 200_000)],
)
def test_first_two_tokens_follow_the_target(
    vocab_size: int, beam_width: int, depth: int, count: int
) -> None:
    """Red when anything from float32 draws to the last draw changes the law."""
    proposer = RsdS(beam_width, depth)
    p_value = emitted_p_value(recursive_rejection, proposer, vocab_size, count)
    assert p_value > LUCK


@pytest.mark.thorough
@pytest.mark.parametrize("name", WRONG_SCORERS)
def test_wrong_scorers_are_noticed_by_sampling(name: str) -> None:
    """Red when the chi-square test could no longer see a lossy scorer."""
    assert emitted_p_value(WRONG_SCORERS[name], RsdS(3, 2), 5, 100_000) < LUCK


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_beam_may_be_wider_than_the_vocabulary(temperature: float) -> None:
    """Red when a beam with empty places draws children below them."""
    draft, _ = random_tables("random", 3, 2)
    proposer, count = RsdS(5, 2), 50
    sampling = PlainSampling(
        torch.full((count,), temperature), all_random=temperature > 0
    )
    uniforms = rand(count, proposer.sizes.num_uniforms)
    tree = propose(proposer, draft, sampling, uniforms)
    assert tree.num_nodes.tolist() == [1 + 3 + 5] * count
    for row in draft.prefixes(tree).tolist():
        assert len(set(row)) == tree.max_nodes - 2
