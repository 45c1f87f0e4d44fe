"""The law of the rules' batched forms, from every draw and every accept branch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from tests.fast.batched_rules import MIXED, rejection
from tests.fast.drawn_trees import Plan, drawn_trees, paths
from tests.fast.enumeration import (
    Scorer,
    Weighted,
    all_trees,
    grid_law_error,
    grid_target,
    law_error,
)
from tests.fast.languages import KINDS, random_tables
from tests.fast.position_noise import by_position_batched
from tests.fast.wrong_scorers import RECURSIVE_REJECTION
from vllm_treespec.proposers import RsdC, Sd
from vllm_treespec.sampling.draws import draw
from vllm_treespec.scorers import ScorerOutput, TargetLogits
from vllm_treespec.trees.builders import from_parents
from vllm_treespec.trees.tree import TreeBatch

EXACT = 1e-12
NOTICEABLE = 1e-3


@pytest.mark.parametrize(
    ("vocab_size", "proposer"),
    [(3, Sd(2)), (5, RsdC((4,))), (5, RsdC((2, 1))), (4, RsdC((2, 2)))],
    ids=["chain", "star", "2x1", "2x2"],
)
@pytest.mark.parametrize("kind", KINDS)
def test_law_of_rejection(kind: str, vocab_size: int, proposer: RsdC) -> None:
    """Red when a node's draws are judged by what another walk leaves there."""
    draft, target = random_tables(kind, vocab_size, proposer.sizes.max_depth)
    assert law_error(rejection, all_trees(draft, proposer), target) < EXACT


@pytest.mark.parametrize("plan", [paths(2, 2, 2), MIXED], ids=["paths", "mixed"])
def test_law_of_multi_round(plan: Plan) -> None:
    """Red when repeats, models or mixed draws at one node lose the law."""
    (one, target), (other, _) = (random_tables("random", 3, 2, seed=s) for s in (0, 7))
    drawn = drawn_trees([one, other], plan)
    assert law_error(rejection, drawn, target) < EXACT


@pytest.mark.parametrize("num_nodes", [1, 2, 3, 4, 5, 6])
def test_law_of_cut_trees(num_nodes: int) -> None:
    """Red when draws that were cut off are still tried."""
    draft, target = random_tables("random", 3, 2)
    drawn = all_trees(draft, RsdC((2, 2)))
    tree = drawn.tree.cut(torch.full_like(drawn.tree.num_nodes, num_nodes))
    assert law_error(rejection, Weighted(tree, drawn.weights), target) < EXACT


def test_law_of_coupled_draw() -> None:
    """Red when a node's token is drawn with another node's number or law."""
    tree = from_parents([[0, 2, 0, 1, 2]], [[-1, 0, 0, 1, 2]])
    drawn = Weighted(tree, torch.ones(1).double())
    assert grid_law_error(by_position_batched, drawn, grid_target()) < EXACT


def with_step(name: str, replacement: Callable[..., Any]) -> Scorer:
    """The right rule with one of its steps replaced."""

    def score(tree: TreeBatch, target: TargetLogits, uniforms: Tensor) -> ScorerOutput:
        with patch.object(RECURSIVE_REJECTION, name, replacement):
            return rejection(tree, target, uniforms)

    return score


def no_draws_tried(
    tree: TreeBatch, target: TargetLogits, uniforms: Tensor
) -> ScorerOutput:
    """Recovers from the target, as if the last node's draws had not been tried."""
    found = rejection(tree, target, uniforms)
    probs = target.probs(torch.arange(tree.num_reqs), found.last_node())
    return replace(found, next_token_ids=draw(probs, uniforms[:, 0]))


WRONG: dict[str, Scorer] = {
    "residual is the target": with_step("subtract", lambda q, p: q),
    "rejected token kept": with_step("drop", lambda p, t: p),
    "recovered from target": no_draws_tried,
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_rejection_is_noticed(name: str) -> None:
    """Red when the checks above could no longer see a lossy rule."""
    draft, target = random_tables("random", 4, 2)
    drawn = all_trees(draft, RsdC((2, 1)))
    assert law_error(WRONG[name], drawn, target) > NOTICEABLE


def test_wrong_coupled_draw_is_noticed() -> None:
    """Red when one number for all nodes would pass for a draw at each."""

    def one_uniform(
        tree: TreeBatch, target: TargetLogits, uniforms: Tensor
    ) -> ScorerOutput:
        return by_position_batched(tree, target, uniforms[:, :1].expand_as(uniforms))

    tree = from_parents([[0, 2, 0, 1, 2]], [[-1, 0, 0, 1, 2]])
    drawn = Weighted(tree, torch.ones(1).double())
    assert grid_law_error(one_uniform, drawn, grid_target()) > NOTICEABLE
