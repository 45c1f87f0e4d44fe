"""K-SEQ: its exact law, its division factor, and the draws it refuses."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor

from tests.fast.drawn_trees import Planned, drawn_trees, independent, paths
from tests.fast.enumeration import JudgeMeter, Weighted, law_error
from tests.fast.languages import KINDS, random_tables
from tests.fast.wrong_scorers import K_SEQ_JUDGE, WRONG_K_SEQ
from vllm_treespec.scorers import k_seq
from vllm_treespec.scorers.k_seq import (
    expected_tries,
    make_judge,
    optimal_division_factor,
)

EXACT = 1e-12
NOTICEABLE = 1e-3


def largest_factor(draft: Tensor, target: Tensor, counts: Tensor) -> Tensor:
    """The number of draws: lossless for all distributions, so never solved for."""
    return counts.double()


@pytest.mark.parametrize("kind", KINDS)
def test_law_of_merged_paths(kind: str) -> None:
    """Red when the residual does not fit the tests, or repeats have no chance."""
    draft, target = random_tables(kind, 3, 2)
    drawn = drawn_trees([draft], paths(2, 2))
    assert law_error(k_seq, drawn, target, K_SEQ_JUDGE) < EXACT


@pytest.mark.parametrize("num_draws", [1, 2, 3, 4])
def test_law_of_one_level(num_draws: int) -> None:
    """Red when the division factor is not that of the node's number of draws."""
    draft, target = random_tables("random", 3, 2)
    drawn = drawn_trees([draft], independent(num_draws))
    assert law_error(k_seq, drawn, target, K_SEQ_JUDGE) < EXACT


@pytest.mark.parametrize("num_nodes", [1, 2, 3, 4, 5])
def test_law_of_cut_trees(num_nodes: int) -> None:
    """Red when a cut node is judged as if it had all its draws."""
    draft, target = random_tables("random", 3, 2)
    drawn = drawn_trees([draft], paths(2, 2))
    tree = drawn.tree.cut(torch.full_like(drawn.tree.num_nodes, num_nodes))
    drawn = Weighted(tree, drawn.weights)
    assert law_error(k_seq, drawn, target, K_SEQ_JUDGE) < EXACT


def test_larger_factor_is_lossless_and_accepts_less() -> None:
    """Red when the law needs the optimal factor, or the optimum gains nothing."""
    draft, target = random_tables("random", 3, 2)
    drawn = drawn_trees([draft], independent(3))
    judge, rule = (
        make_judge(largest_factor),
        partial(k_seq, division_factor=largest_factor),
    )
    assert law_error(rule, drawn, target, judge) < EXACT
    optimal = JudgeMeter(k_seq, drawn, target, K_SEQ_JUDGE).first_accepted()
    assert JudgeMeter(rule, drawn, target, judge).first_accepted() < optimal - 0.01


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


@pytest.mark.parametrize("name", WRONG_K_SEQ)
def test_wrong_rules_are_noticed(name: str) -> None:
    """Red when the checks above could no longer see a lossy rule."""
    draft, target = random_tables("random", 3, 2, seed=4)
    drawn = drawn_trees([draft], independent(2))
    assert law_error(WRONG_K_SEQ[name], drawn, target, K_SEQ_JUDGE) > NOTICEABLE


@pytest.mark.parametrize(
    "second",
    [Planned(model=1), Planned(without_replacement=True)],
    ids=["models", "rest"],
)
def test_other_draws_are_refused(second: Planned) -> None:
    """Red when draws for which the rule is lossy are judged by it all the same."""
    draft, target = random_tables("random", 3, 2)
    drawn = drawn_trees([draft, draft], [[Planned(), second]])
    with pytest.raises(ValueError, match="independent draws from one distribution"):
        law_error(k_seq, drawn, target)
