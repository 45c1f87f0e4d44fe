"""Optimal transport: its exact law and the rates known in closed form."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from benchmarks.rsd.toy import two_token_transport_rate
from tests.fast.drawn_trees import drawn_trees, independent, paths
from tests.fast.enumeration import Scorer, law_error
from tests.fast.languages import random_tables
from tests.fast.wrong_scorers import judged, rest_is_target, rest_of_one_draw
from tests.reference.optimal_transport import (
    judge,
    optimal_transport,
    optimal_transport_rate,
)
from vllm_treespec.scorers.independent_draws import Judge

EXACT = 1e-12
NOTICEABLE = 1e-3


@pytest.mark.parametrize("kind", ["random", "zeros", "equal", "disjoint", "peaked"])
def test_law_of_merged_paths(kind: str) -> None:
    """Red when the plan's rows or what they leave over are drawn wrongly."""
    draft, target = random_tables(kind, 3, 2)
    drawn = drawn_trees([draft], paths(2, 2))
    assert law_error(optimal_transport, drawn, target, judge) < EXACT


def test_law_of_three_draws() -> None:
    """Red when a token drawn twice gets its share twice."""
    draft, target = random_tables("random", 3, 2)
    drawn = drawn_trees([draft], independent(3))
    assert law_error(optimal_transport, drawn, target, judge) < EXACT


def forgets_order(judge: Judge) -> Judge:
    """Judges the draws as if they had come the other way round."""

    def wrong(
        draft: Tensor, target: Tensor, tokens: Tensor, counts: Tensor
    ) -> tuple[Tensor, Tensor]:
        return judge(draft, target, tokens.flip(1), counts)

    return wrong


WRONG: dict[str, Scorer] = {
    "recovered from target": judged(rest_is_target, judge),
    "residual of one draw": judged(rest_of_one_draw, judge),
    "draws judged in reverse": judged(forgets_order, judge),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_rules_are_noticed(name: str) -> None:
    """Red when the checks above could no longer see a lossy rule."""
    draft, target = random_tables("random", 3, 2, seed=4)
    drawn = drawn_trees([draft], independent(2))
    assert law_error(WRONG[name], drawn, target, judge) > NOTICEABLE


@pytest.mark.parametrize("p", [0.1, 0.3, 0.5, 0.8])
@pytest.mark.parametrize("q", [0.1, 0.5, 0.75, 1.0])
@pytest.mark.parametrize("num_draws", [1, 2, 3])
def test_two_tokens_have_a_closed_form(p: float, q: float, num_draws: int) -> None:
    """Red when the linear programme loses mass it could accept, or the toy figure's
    formula is another optimum.

    Of two tokens, y cannot be emitted where it was not drawn; nothing else forbids
    acceptance, so each token's accepted mass is bounded by that of being drawn.
    """
    draft = torch.tensor([p, 1 - p], dtype=torch.float64)
    target = torch.tensor([q, 1 - q], dtype=torch.float64)
    expected = two_token_transport_rate(draft, target, num_draws)
    rate = optimal_transport_rate(draft, target, num_draws)
    assert rate == pytest.approx(expected, abs=1e-12)
