"""SpecInfer: each model's draws, how trees merge, and what is emitted from them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.fast.drafting import propose
from tests.fast.enumeration import all_trees
from tests.fast.languages import Language, random_tables
from vllm_treespec.config import parse_spec_config
from vllm_treespec.proposers import SpecInfer
from vllm_treespec.sampling.laws import SamplingTensors
from vllm_treespec.scorers import RULES
from vllm_treespec.trees.tree import draw_parents

# vocabulary, branching factors of each draft model
SHAPES: list[tuple[int, list[tuple[int, ...]]]] = [
    (4, [(2, 1)]),
    (4, [(1,), (1,)]),
    (3, [(2,), (1, 1)]),
    (3, [(1, 1), (1, 1)]),
    (2, [(2, 2), (1, 2)]),
    (2, [(1, 1), (1,), (2, 1)]),
]


def two_models(kind: str, vocab_size: int, num_models: int = 2) -> list[Language]:
    """Draft models that speak different languages, two levels deep."""
    return [random_tables(kind, vocab_size, 2, seed)[0] for seed in range(num_models)]


@pytest.mark.parametrize(("vocab_size", "branching_factors"), SHAPES)
def test_rows_belong_to_the_drawing_model(
    vocab_size: int, branching_factors: list[tuple[int, ...]]
) -> None:
    """Red when a draw points to another model's distribution, or to another node's."""
    models = two_models("random", vocab_size, len(branching_factors))
    tree = all_trees(SpecInfer(branching_factors), models).tree
    draws, prefixes = tree.draws, models[0].prefixes(tree)
    assert draws is not None
    assert not bool(draws.without_replacement.any())
    above = prefixes.gather(1, draw_parents(tree))
    reqs = torch.arange(tree.num_reqs)[:, None]
    drawn_from = draws.probs[reqs, draws.rows]
    laws = torch.stack([model.table[above] for model in models])
    author = (laws == drawn_from).all(-1).int()
    assert author.sum(0).eq(1).all()
    # Below each node the models come in their order.
    author = author.argmax(0)
    together = draw_parents(tree)[:, 1:] == draw_parents(tree)[:, :-1]
    assert bool((author[:, 1:] >= author[:, :-1])[together].all())
    counts = [factors[0] for factors in branching_factors]
    first = author[:, : sum(counts)].flatten().bincount().tolist()
    assert first == [count * tree.num_reqs for count in counts]


def test_merged_node_has_the_draws_of_both_models() -> None:
    """Red when a node drawn by two models loses one model's draws below it."""
    one = Language(torch.tensor([[1.0, 0], [1, 0], [1, 0]]).double())
    other = Language(torch.tensor([[1.0, 0], [0, 1], [0, 1]]).double())
    uniforms = torch.full((1, 5), 0.5, dtype=torch.float64)
    tree = propose(SpecInfer([(1, 2), (1, 1)]), [one, other], uniforms)
    assert tree.draws is not None
    assert tree.num_nodes.tolist() == [4]
    assert tree.token_ids.tolist() == [[0, 0, 0, 1, 0, 0]]
    assert tree.parents.tolist() == [[-1, 0, 1, 1, -1, -1]]
    assert tree.draws.nodes.tolist() == [[1, 1, 2, 2, 3]]
    # Rows: the first model's two levels, then the second model's.
    assert tree.draws.rows.tolist() == [[0, 2, 1, 1, 3]]


# Greedy


def greedy_tree(top_k: Tensor | None = None) -> list[list[list[int]]]:
    """Tokens and parents of a tree that two models propose at temperature 0."""
    one, other = torch.zeros(31, 5), torch.zeros(31, 5)
    one[:, [3, 1]] = torch.tensor([2.0, 1.0])
    other[:, [3, 4]] = torch.tensor([2.0, 1.0])
    sampling = SamplingTensors(torch.zeros(1), top_k=top_k, all_greedy=True)
    models = [Language(one), Language(other)]
    tree = propose(SpecInfer([(2, 1), (2, 1)]), models, sampling=sampling)
    assert tree.draws is None
    size = int(tree.num_nodes)
    return [tree.token_ids[0, :size].tolist(), tree.parents[0, :size].tolist()]


def test_greedy_trees_merge_the_likeliest_tokens() -> None:
    """Red when temperature 0 stops to take every model's top tokens."""
    assert greedy_tree() == [[0, 3, 1, 4, 3, 3, 3], [-1, 0, 0, 0, 1, 2, 3]]


def test_greedy_trees_leave_out_tokens_without_mass() -> None:
    """Red when top-k below the branching factor drafts tokens without mass."""
    assert greedy_tree(torch.tensor([1])) == [[0, 3, 3], [-1, 0, 1]]


# Spec-config


def test_spec_config() -> None:
    """Red when a draft model does not get the branching factors written beside it."""
    drafts = [
        {"model": "one", "branching_factors": [2, 2]},
        {"model": "other", "branching_factors": [1, 1, 1]},
    ]
    config = parse_spec_config({"method": "specinfer", "drafts": drafts})
    assert (config.models, config.rule) == (("one", "other"), RULES["multi_round"])
    proposer = config.proposer()
    assert isinstance(proposer, SpecInfer)
    assert proposer.branching_factors == [(2, 2), (1, 1, 1)]
