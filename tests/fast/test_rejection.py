"""The law that the chain and RSD-C emit, from every draw and every accept branch."""

from __future__ import annotations

import pytest
import torch

from tests.fast.enumeration import (
    ALMOST_ONE,
    FLOAT32,
    all_trees,
    float32_law_error,
)
from tests.fast.languages import (
    Language,
    plain_sampling,
    random_tables,
)
from vllm_treespec.proposers import RsdC
from vllm_treespec.scorers import recursive_rejection
from vllm_treespec.scorers.recursive_rejection import drop, subtract


def test_masked_draws_leave_children_out() -> None:
    """Red when a draft support smaller than the branching factor is not noticed."""
    draft, _ = random_tables("top_k", 5, 2)
    tree = all_trees(RsdC((3, 1)), draft).tree
    assert tree.num_nodes.unique().tolist() == [1 + 2 + 2]
    assert tree.max_nodes == 1 + 3 + 3


@pytest.mark.parametrize("uniform", [0.0, 0.5, ALMOST_ONE])
def test_two_tokens_are_always_accepted(uniform: float) -> None:
    """Red when a second sibling is judged by anything but its own residual.

    The toy example of arXiv 2402.14160, section 3.1.
    """
    draft, target = random_tables("two_tokens", 4, 2)
    tree = all_trees(RsdC((2,)), draft).tree
    shape = (tree.num_reqs, tree.max_nodes + 1)
    uniforms = torch.full(shape, uniform, dtype=torch.float64)
    logits = target.target_logits(tree, plain_sampling(tree.num_reqs))
    output = recursive_rejection(tree, logits, uniforms)
    assert output.num_accepted.tolist() == [1] * tree.num_reqs


def test_tokens_without_target_mass_are_never_accepted() -> None:
    """Red when the accept test stops being strict: a uniform may be 0."""
    draft, target = random_tables("disjoint", 4, 2)
    tree = all_trees(RsdC((2, 1)), draft).tree
    uniforms = torch.zeros(tree.num_reqs, tree.max_nodes + 1, dtype=torch.float64)
    logits = target.target_logits(tree, plain_sampling(tree.num_reqs))
    output = recursive_rejection(tree, logits, uniforms)
    assert int(output.num_accepted.sum()) == 0
    assert bool((target.table[0, output.next_token_ids] > 0).all())


@pytest.mark.parametrize(
    ("top_k", "top_p"), [(None, None), (2, None), (None, 0.7), (3, 0.8)]
)
def test_float32_law_under_sampling_parameters(
    top_k: int | None, top_p: float | None
) -> None:
    """Red when draft and target are masked differently, or float32 loses the law."""
    draft, target = (side.table.log().float() for side in random_tables("random", 4, 2))
    error = float32_law_error(
        recursive_rejection, draft, Language(target), top_k=top_k, top_p=top_p
    )
    assert error < FLOAT32


def test_subtract_and_drop_at_the_edges() -> None:
    """Red when an empty residual or an exhausted draft gives NaN or a wrong law."""
    law = torch.tensor([[0.25, 0.75, 0.0]])
    assert subtract(law, law.clone()).equal(law)
    assert subtract(law, torch.tensor([[1.0, 0.0, 0.0]])).tolist() == [[0, 1, 0]]
    assert subtract(law, torch.tensor([[0.0, 0.0, 1.0]])).equal(law)
    assert drop(law, torch.tensor([1])).tolist() == [[1, 0, 0]]
    alone = torch.tensor([[0.0, 1.0, 0.0]])
    assert drop(alone, torch.tensor([1])).tolist() == [[0, 0, 0]]
