"""Target draw: the target's law for every tree, whatever it was made from."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.fast.drawn_trees import drawn_trees, paths
from tests.fast.enumeration import Weighted, grid_law_error, grid_target
from tests.fast.languages import (
    Language,
    plain_sampling,
    random_tables,
)
from tests.fast.wrong_scorers import WRONG_TARGET_DRAW
from vllm_treespec.core.tree_builders import from_parents
from vllm_treespec.scorers import target_draw

EXACT = 1e-12
NOTICEABLE = 1e-3


def one_tree(token_ids: list[int], parents: list[int]) -> Weighted:
    """A deterministic tree."""
    return Weighted(from_parents([token_ids], [parents]), torch.ones(1).double())


TREES = {
    "root only": ([0], [-1]),
    "chain": ([0, 1, 0], [-1, 0, 1]),
    "unlikely first": ([0, 2, 0, 1, 2], [-1, 0, 0, 1, 2]),
    "all children": ([0, 0, 1, 2, 0, 1, 2, 1], [-1, 0, 0, 0, 1, 1, 1, 2]),
}


@pytest.mark.parametrize("name", TREES)
def test_law_of_deterministic_trees(name: str) -> None:
    """Red when the order or the number of children changes what is emitted."""
    drawn = one_tree(*TREES[name])
    assert grid_law_error(target_draw, drawn, grid_target()) < EXACT


def test_law_of_drawn_trees_cut_by_value() -> None:
    """Red when the rule starts to depend on how the tree came about."""
    draft, _ = random_tables("random", 3, 2)
    drawn = drawn_trees([draft], paths(2, 2))
    kept = torch.where(drawn.tree.token_ids[:, 1] == 0, 2, 5)
    cut = Weighted(drawn.tree.cut(kept), drawn.weights)
    assert grid_law_error(target_draw, cut, grid_target()) < EXACT


@pytest.mark.parametrize("name", WRONG_TARGET_DRAW)
def test_wrong_rules_are_noticed(name: str) -> None:
    """Red when the checks above could no longer see a lossy rule."""
    drawn = one_tree(*TREES["unlikely first"])
    error = grid_law_error(WRONG_TARGET_DRAW[name], drawn, grid_target())
    assert error > NOTICEABLE


def test_it_needs_one_uniform_a_node() -> None:
    """Red when the rule asks for more numbers than a step hands out."""
    tree = one_tree(*TREES["chain"]).tree
    target = Language(torch.eye(3).double()[[1, 0, 2, 2, 2] + [0] * 8])
    logits = target.target_logits(tree, plain_sampling(1))
    output = target_draw(tree, logits, torch.zeros(1, tree.max_nodes).double())
    assert output.path.tolist() == [[1, -1]]
    assert output.next_token_ids.tolist() == [2]


def test_draws_are_not_looked_at() -> None:
    """Red when sampled drafts are judged differently from the same fixed tree."""
    draft, target = random_tables("random", 3, 2)
    tree = drawn_trees([draft], paths(2, 2)).tree
    generator = torch.Generator().manual_seed(0)
    uniforms = torch.rand(tree.token_ids.shape, generator=generator).double()
    logits = target.target_logits(tree, plain_sampling(tree.num_reqs))
    output = target_draw(tree, logits, uniforms)
    bare = target_draw(replace(tree, draws=None), logits, uniforms)
    assert output.emitted(tree).equal(bare.emitted(tree))
    assert int(output.num_accepted.max()) == 2
