"""Multi-round rejection: its exact law over repeats, models and mixed draws."""

from __future__ import annotations

import pytest
import torch

from tests.fast.drawn_trees import (
    Plan,
    Planned,
    drawn_trees,
    independent,
    paths,
    side_by_side,
)
from tests.fast.enumeration import Weighted, law_error
from tests.fast.languages import KINDS, Language, random_tables
from tests.fast.wrong_scorers import WRONG_MULTI_ROUND
from vllm_treespec.scorers import RULES, multi_round, recursive_rejection
from vllm_treespec.trees.tree import num_draws

EXACT = 1e-12
NOTICEABLE = 1e-3

# Model 0 without replacement, then model 1 independently, twice.
MIXED: Plan = [
    [Planned(), Planned(without_replacement=True), Planned(0, 1), Planned(0, 1)]
]


def models(
    kind: str = "random", vocab_size: int = 3
) -> tuple[list[Language], Language]:
    """Two draft models and a target."""
    one, target = random_tables(kind, vocab_size, 2)
    return [one, random_tables(kind, vocab_size, 2, seed=7)[0]], target


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_models", [1, 2])
def test_law_of_merged_paths(kind: str, num_models: int) -> None:
    """Red when a repeated draw is skipped, or judged by another model's draft."""
    drafts, target = models(kind)
    drawn = drawn_trees(drafts, paths(2, 2, num_models))
    assert law_error(multi_round, drawn, target) < EXACT


def test_law_of_three_paths_of_two_models() -> None:
    """Red when draws of merged nodes are not tried in a fixed order."""
    drafts, target = models()
    drawn = drawn_trees(drafts, paths(3, 2, num_models=2))
    assert int(num_draws(drawn.tree).max()) == 3
    assert int(drawn.tree.num_nodes.min()) == 3
    assert law_error(multi_round, drawn, target) < EXACT


@pytest.mark.parametrize("kind", ["random", "zeros", "two_tokens", "peaked"])
def test_law_of_draws_with_and_without_replacement_at_one_node(kind: str) -> None:
    """Red when a draw from the rest and an independent one cannot meet at a node."""
    drafts, target = models(kind)
    if kind == "zeros":  # at least two tokens to draw without replacement
        drafts[0] = Language(drafts[0].table * 0.9 + 0.1 / 3)
    drawn = drawn_trees(drafts, MIXED)
    assert law_error(multi_round, drawn, target) < EXACT


def test_law_of_draws_with_and_without_replacement_in_one_batch() -> None:
    """Red when one request's kind of draws leaks into another's."""
    drafts, target = models()
    below = [Planned(0), Planned(1)]
    with_replacement = drawn_trees(drafts, [[Planned(), Planned()], below])
    without = drawn_trees(
        drafts, [[Planned(), Planned(without_replacement=True)], below]
    )
    both = side_by_side(with_replacement, without)
    assert law_error(recursive_rejection, both, target) < EXACT
    assert law_error(RULES["multi_round"].walk, both, target) < EXACT


@pytest.mark.parametrize("num_nodes", [1, 2, 3, 4, 5])
def test_law_of_cut_trees(num_nodes: int) -> None:
    """Red when cutting looks at a draw's token: repeats need no new node."""
    drafts, target = models()
    drawn = drawn_trees(drafts, paths(2, 2, num_models=2))
    tree = drawn.tree.cut(torch.full_like(drawn.tree.num_nodes, num_nodes))
    assert law_error(multi_round, Weighted(tree, drawn.weights), target) < EXACT


def test_cutting_by_value_is_noticed() -> None:
    """Red when a cut that depends on the drawn tokens would pass."""
    drafts, target = models()
    drawn = drawn_trees(drafts, independent(2))
    kept = torch.where(drawn.tree.token_ids[:, 1] == 0, 1, 3)
    cut = Weighted(drawn.tree.cut(kept), drawn.weights)
    assert law_error(multi_round, cut, target) > NOTICEABLE


@pytest.mark.parametrize("name", WRONG_MULTI_ROUND)
def test_wrong_rules_are_noticed(name: str) -> None:
    """Red when the checks above could no longer see a lossy rule."""
    drafts, target = models()
    drawn = drawn_trees(drafts, paths(3, 1, num_models=2))
    assert law_error(WRONG_MULTI_ROUND[name], drawn, target) > NOTICEABLE
