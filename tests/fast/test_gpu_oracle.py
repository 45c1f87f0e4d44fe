"""The drafter of fixed acceptance: its trees, and the law of what is accepted."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from benchmarks.gpu.oracle import (
    OracleProposer,
    accept_by_coins,
    fixed_parents,
    last_path,
)
from benchmarks.gpu.step import default_depth
from tests.fast.drafting import propose, same_trees
from vllm_treespec.trees.builders import from_parents
from vllm_treespec.trees.tree import TreeBatch


@pytest.mark.parametrize("num_nodes", [1, 2, 8, 16, 32, 64])
def test_oracle_trees(num_nodes: int) -> None:
    """Red when the oracle's tree is not in level order or lacks a level."""
    depth = default_depth(num_nodes)
    proposer = OracleProposer(num_nodes, depth, vocab_size=50)
    tree = propose(proposer, num_reqs=2, root_token_ids=torch.tensor([3, 4]))
    made = from_parents(tree.token_ids.tolist(), tree.parents.tolist())
    assert same_trees(tree, made)
    assert int(tree.depths.max()) == depth
    assert tree.token_ids[:, 0].tolist() == [3, 4]
    path = last_path(proposer.parents)
    assert tree.depths[0, path].tolist() == list(range(1, depth + 1))
    leaves = set(range(num_nodes)) - set(proposer.parents)
    assert proposer.sizes.max_leaves == len(leaves)


def test_impossible_oracle_tree_is_refused() -> None:
    """Red when a tree of other depth than asked for is drawn silently."""
    with pytest.raises(ValueError, match="cannot have 9 levels"):
        fixed_parents(8, 9)


def coins(num_trees: int, rate: float, cut: int | None = None) -> Any:
    """What coins accept of trees of 16 nodes, 4 levels."""
    parents = fixed_parents(16, 4)
    tree: TreeBatch = from_parents([[0] * 16], [parents]).select(
        torch.zeros(num_trees, dtype=torch.int64)
    )
    if cut is not None:
        tree = tree.cut(torch.full((num_trees,), cut))
    generator = torch.Generator().manual_seed(1)
    uniforms = torch.rand((num_trees, 16), generator=generator, dtype=torch.float64)
    path = torch.tensor(last_path(parents))
    chosen = torch.arange(num_trees)
    return tree, accept_by_coins(tree, path, rate, uniforms, chosen)


def test_oracle_accepts_at_its_rate() -> None:
    """Red when depth k is not reached with probability rate ** k."""
    trees = 200_000
    _, scored = coins(trees, 0.7)
    for depth in range(1, 5):
        share = float((scored.num_accepted >= depth).double().mean())
        sigma = (0.7**depth * (1 - 0.7**depth) / trees) ** 0.5
        assert abs(share - 0.7**depth) < 5 * sigma
    assert torch.equal(scored.next_token_ids, torch.arange(trees))


def test_oracle_paths_are_paths() -> None:
    """Red when an accepted node's parent is not accepted, or lies beyond a cut."""
    tree, scored = coins(300, 0.9, cut=9)
    assert int(scored.num_accepted.max()) == 2
    for row in range(300):
        path = scored.path[row].tolist()
        count = int(scored.num_accepted[row])
        assert all(node >= 0 for node in path[:count])
        assert all(node == -1 for node in path[count:])
        above = [0, *path[: max(count - 1, 0)]]
        for node, parent in zip(path[:count], above, strict=False):
            assert int(tree.parents[row, node]) == parent
    assert int(coins(5, 0.0)[1].num_accepted.sum()) == 0
    assert coins(5, 1.0)[1].num_accepted.tolist() == [4] * 5
