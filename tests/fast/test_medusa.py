"""Medusa: the static tree, what fills it, and its law."""

from __future__ import annotations

from itertools import product
from math import prod

import pytest
import torch

from tests.fast.drafting import same_trees, token_paths
from tests.fast.tiny_heads import DEPTH, VOCAB_SIZE, drafted, step_inputs, tiny_head
from vllm_treespec.proposers import Medusa
from vllm_treespec.proposers.medusa import grow_tree
from vllm_treespec.sampling.laws import SamplingTensors
from vllm_treespec.trees.builders import from_parents

ACCURACIES = [[0.5, 0.25, 0.125], [0.5, 0.25], [0.25, 0.125], [0.25]]


def test_tree_by_hand() -> None:
    """Red when growth, ties or the order of nodes change.

    Products: (0) 1/2, (1) 1/4, (0, 0) 1/4, (2), (0, 1), (1, 0) 1/8, (0, 0, 0),
    (1, 1), (2, 0) 1/16.
    """
    assert grow_tree(2, ACCURACIES) == [(0,), (1,)]
    assert grow_tree(3, ACCURACIES) == [(0,), (1,), (0, 0)]
    assert grow_tree(6, ACCURACIES) == [(0,), (1,), (2,), (0, 0), (0, 1), (1, 0)]
    assert grow_tree(8, ACCURACIES)[6:] == [(1, 1), (2, 0)]


def test_tree_has_the_best_products() -> None:
    """Red when a better node is left out, or a node comes without its parent."""
    for seed in range(20):
        check_best(torch.Generator().manual_seed(seed))


def check_best(generator: torch.Generator) -> None:
    """Compare trees of random accuracies with all products, sorted."""
    ranks = (4, 3, 3)
    # Not always falling with the rank; some were never right.
    accuracies = [
        (torch.rand(count, generator=generator) - 0.2).clamp(min=0).double().tolist()
        for count in ranks
    ]

    def value(path: tuple[int, ...]) -> float:
        return prod(level[rank] for level, rank in zip(accuracies, path, strict=False))

    every = [
        path
        for depth in (1, 2, 3)
        for path in product(*(range(count) for count in ranks[:depth]))
        if value(path) > 0
    ]
    every.sort(key=lambda path: -value(path))
    for num_drafts in (1, 5, 12, 63):
        found = grow_tree(num_drafts, accuracies)
        assert set(found) == set(every[:num_drafts])
        assert all(path[:-1] in {(), *found} for path in found)
        assert found == sorted(found, key=lambda path: (len(path), path))


@pytest.mark.parametrize("accuracies", [[], [[]], [[0.0, 0.0], [0.5]]])
def test_missing_accuracies_are_refused(accuracies: list[list[float]]) -> None:
    """Red when an untrained head starts without a word on what to do."""
    with pytest.raises(ValueError, match="train it again"):
        Medusa(16, accuracies)


@pytest.mark.parametrize("hot", [True, False])
def test_nodes_hold_their_levels_top_ranks(hot: bool) -> None:
    """Red when a node gets another level's, rank's or request's token."""
    head = tiny_head("medusa", hot)
    hidden, roots = step_inputs(4)
    proposer = Medusa(20, ACCURACIES)
    tree = drafted(proposer, head, hidden, roots)
    assert proposer.sizes.max_depth == DEPTH
    assert Medusa(8, ACCURACIES).num_ranks == [3, 2]
    tokens = roots[:, None].expand(-1, DEPTH)
    features = head(hidden, tokens, torch.ones_like(tokens, dtype=torch.bool))
    logits = head.logits(features).unflatten(0, (4, DEPTH))
    ranked = logits.argsort(dim=-1, descending=True)
    if head.hot_token_ids is not None:
        ranked = head.hot_token_ids[ranked]
    ranks = [(), *grow_tree(20, ACCURACIES)]
    for req in range(4):
        expected = [
            tuple(int(ranked[req, level, rank]) for level, rank in enumerate(path))
            for path in ranks
        ]
        assert token_paths(tree, req) == expected
        one = torch.tensor([req])
        alone = drafted(proposer, head, hidden[one], roots[one])
        assert token_paths(alone) == expected
    assert tree.token_ids[:, 0].equal(roots)
    assert tree.draws is None
    rebuilt = from_parents(tree.token_ids.tolist(), tree.parents.tolist())
    assert rebuilt.depths.equal(tree.depths)


def test_sampling_parameters_do_not_change_the_tree() -> None:
    """Red when the size of the tree starts to depend on a request's parameters."""
    head, (hidden, roots) = tiny_head("medusa"), step_inputs(3)
    sampling = SamplingTensors(
        torch.tensor([0.3, 2.0, 0.0]),
        torch.tensor([1, 2, VOCAB_SIZE]),
        torch.tensor([1.0, 0.4, 1.0]),
    )
    proposer = Medusa(12, ACCURACIES)
    tree = drafted(proposer, head, hidden, roots, sampling)
    plain = drafted(proposer, head, hidden, roots)
    assert same_trees(tree, plain)
