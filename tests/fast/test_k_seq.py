"""K-SEQ: its exact law, its division factor, and the draws it refuses."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor

from tests.fast.enumeration import EXACT, LawMeter, all_trees, law_error, num_models
from tests.fast.languages import random_tables
from tests.fast.wrong_rules import K_SEQ_JUDGE
from vllm_treespec.proposers import Proposer, RsdC, SpecInfer, SpecTr
from vllm_treespec.scorers import k_seq
from vllm_treespec.scorers.k_seq import (
    expected_tries,
    make_judge,
    optimal_division_factor,
)


def largest_factor(draft: Tensor, target: Tensor, counts: Tensor) -> Tensor:
    """The number of draws: lossless for all distributions, so never solved for."""
    return counts.double()


def test_larger_factor_is_lossless_and_accepts_less() -> None:
    """Red when the law needs the optimal factor, or the optimum gains nothing."""
    draft, target = random_tables("random", 3, 2)
    drawn = all_trees(SpecTr(3, 1), draft)
    judge, rule = (
        make_judge(largest_factor),
        partial(k_seq, division_factor=largest_factor),
    )
    assert law_error(rule, drawn, target, judge) < EXACT
    optimal = LawMeter(k_seq, drawn, target, judge=K_SEQ_JUDGE).first_accepted()
    assert LawMeter(rule, drawn, target, judge=judge).first_accepted() < optimal - 0.01


def test_optimal_factor_solves_its_equation() -> None:
    """Red when the factor is below the optimum, or farther above than it claims."""
    generator = torch.Generator().manual_seed(0)
    draft, target = (
        torch.rand((2, 200, 6), generator=generator, dtype=torch.float64) ** 4
    )
    draft, target = draft / draft.sum(1, True), target / target.sum(1, True)
    counts = torch.arange(200) % 7 + 1
    factor = optimal_division_factor(draft, target, counts)

    def missing(factor: Tensor) -> Tensor:
        rate = torch.minimum(draft, target / factor[:, None]).sum(1)
        return expected_tries(rate, counts) - factor

    assert bool((factor >= 1).all())
    assert bool((factor <= counts).all())
    assert bool((missing(factor) <= 1e-12).all())
    closer = (factor - 2e-6 * counts).clamp(min=1)
    assert bool((missing(closer)[factor > 1.001] > 0).all())
    assert factor[counts == 1].eq(1).all()


def test_expected_tries_at_the_edges() -> None:
    """Red when nothing or everything accepted divides by zero."""
    rate, counts = torch.tensor([0.0, 1.0, 0.5]).double(), torch.tensor([3, 3, 2])
    assert expected_tries(rate, counts).tolist() == [3.0, 1.0, 1.5]


@pytest.mark.parametrize(
    "proposer", [SpecInfer([(1,), (1,)]), RsdC((2,))], ids=["models", "rest"]
)
def test_other_draws_are_refused(proposer: Proposer) -> None:
    """Red when draws for which the rule is lossy are judged by it all the same."""
    draft, target = random_tables("random", 3, 2)
    drawn = all_trees(proposer, [draft, draft][: num_models(proposer)])
    with pytest.raises(ValueError, match="independent draws from one distribution"):
        law_error(k_seq, drawn, target)
