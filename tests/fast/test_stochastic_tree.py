"""The drawn dynamic tree: its law exactly and by chi-square, its cuts, its limits.

With the uniforms of the Gumbel values held fixed every token draw is enumerated, as for
RSD-S: a node is kept or not by values that do not depend on its own token.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import product
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from tests.fast.batched_rules import rejection
from tests.fast.beam_trees import all_beam_trees, rand
from tests.fast.chi_square import emitted_p_value
from tests.fast.enumeration import Scorer, Weighted, law_error, propose
from tests.fast.languages import (
    Language,
    LanguageDraft,
    plain_sampling,
    random_tables,
)
from tests.fast.tiny_heads import drafted, greedy, step_inputs, tiny_head, token_paths
from tests.fast.tree_bounds import CountingDraft, check_bounds
from tests.tiers import cases
from vllm_treespec.config import parse_spec_config
from vllm_treespec.proposers import (
    DynamicTree,
    ProposerInputs,
    RsdS,
    StochasticTree,
)
from vllm_treespec.proposers.rsd_s import expand_beam
from vllm_treespec.sampling.laws import SamplingTensors
from vllm_treespec.scorers import recursive_rejection
from vllm_treespec.trees.builders import from_candidates
from vllm_treespec.trees.tree import TreeBatch

EXACT = 1e-12
NOTICEABLE = 1e-3
# A right program fails one chi-square test in a million; wrong ones are far beyond.
LUCK = 1e-6
STOCHASTIC_TREE = importlib.import_module("vllm_treespec.proposers.stochastic_tree")


# Exact, given the Gumbel uniforms


def all_trees(draft: Language, width: int, num_drafts: int, seed: int) -> Weighted:
    """Every token draw of two levels."""
    proposer = StochasticTree(width, 2, num_drafts)
    return all_beam_trees(proposer, draft, width, seed)


@pytest.mark.parametrize(
    ("vocab_size", "width", "num_drafts", "kind"),
    cases(
        [
            (*sizes, kind)
            for kind in ("random", "zeros", "equal", "disjoint")
            for sizes in (
                *((3, 2, 2), (3, 2, 4), (4, 2, 3)),
                *((4, 2, 5), (3, 3, 3), (3, 3, 7)),
            )
        ],
        quick=[
            (3, 3, 7, "random"),
            (3, 3, 3, "random"),
            *((3, 2, 4, kind) for kind in ("random", "zeros", "equal", "disjoint")),
        ],
    ),
)
def test_emitted_law_is_the_targets(
    vocab_size: int, width: int, num_drafts: int, kind: str
) -> None:
    """Red when the choice of nodes depends on tokens that it must not look at."""
    draft, target = random_tables(kind, vocab_size, 2)
    for seed in range(2):
        drawn = all_trees(draft, width, num_drafts, seed)
        assert law_error(recursive_rejection, drawn, target) < EXACT
    assert law_error(rejection, drawn, target) < EXACT


def cut_law_error(num_nodes: int, rule: Scorer, *, keeps_draws: bool) -> float:
    """Error of the law when trees of 4 drafts are cut."""
    draft, target = random_tables("random", 3, 2)
    drawn = all_trees(draft, 3, 4, seed=2)
    tree = drawn.tree
    assert tree.draws is not None
    if keeps_draws:
        tree = replace(tree, draws=replace(tree.draws, min_nodes=0))
    cut = tree.cut(torch.full_like(tree.num_nodes, num_nodes))
    return law_error(rule, Weighted(cut, drawn.weights), target)


@pytest.mark.parametrize("rule", [recursive_rejection, rejection])
@pytest.mark.parametrize("num_nodes", [1, 2, 3, 4, 5, 6])
def test_law_of_cut_trees(num_nodes: int, rule: Scorer) -> None:
    """Red when a tree that the scheduler has cut is no longer verified losslessly."""
    assert cut_law_error(num_nodes, rule, keeps_draws=False) < EXACT


def test_cut_trees_that_keep_their_draws_are_noticed() -> None:
    """Red when the check above could no longer see why cut trees lose their draws.

    How many nodes of the first level are kept depends on values below the others, and
    so on tokens. Then it depends on a node's token whether the cut keeps the node.
    """
    assert cut_law_error(3, recursive_rejection, keeps_draws=True) > NOTICEABLE
    assert cut_law_error(5, recursive_rejection, keeps_draws=True) < EXACT


def test_only_whole_trees_keep_their_draws() -> None:
    """Red when a cut that removes no node of a smaller tree looks at its size."""
    draft, _ = random_tables("one_token", 3, 2)
    proposer = StochasticTree(2, 2, 5)
    uniforms = rand(3, proposer.sizes.num_uniforms)
    tree = propose(proposer, draft, plain_sampling(3), uniforms)
    assert int(tree.num_nodes.max()) < tree.max_nodes == 6
    for limit, kept in ((6, True), (5, False), (64, True)):
        draws = tree.cut(torch.full((3,), limit)).draws
        assert draws is not None
        assert bool(draws.nodes.any()) == kept


# Wrong ways to rank


@contextmanager
def ranked_by_probability() -> Iterator[None]:
    """Keep the candidates of the highest log probability instead of psi."""
    log_probs: list[Tensor] = []

    def expand(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
        drawn = expand_beam(*arguments)
        log_probs.append(drawn[1].flatten(1))
        return drawn

    def keep(roots: Tensor, *levels: Any, **rest: Any) -> TreeBatch:
        tokens, parents, _, *others = levels
        return from_candidates(roots, tokens, parents, log_probs, *others, **rest)

    with (
        patch.object(STOCHASTIC_TREE, "expand_beam", expand),
        patch.object(STOCHASTIC_TREE, "from_candidates", keep),
    ):
        yield


def test_tree_ranked_by_probability_is_lossy() -> None:
    """Red when the exact check could no longer see a choice by tokens."""
    draft, target = random_tables("random", 4, 2)
    with ranked_by_probability():
        drawn = all_trees(draft, 2, 4, seed=0)
    assert law_error(recursive_rejection, drawn, target) > NOTICEABLE


@pytest.mark.parametrize("shape", [(3, 2, 5), (2, 3, 4)])
def test_ranking_by_probability_is_noticed(shape: tuple[int, int, int]) -> None:
    """Red when the chi-square test could no longer see a choice by tokens."""
    with ranked_by_probability():
        p_value = emitted_p_value(
            recursive_rejection, StochasticTree(*shape), 4, 100_000
        )
    assert p_value < LUCK


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("vocab_size", "shape", "count", "num_tokens"),
    [
        (5, (3, 2, 5), 400_000, 2),
        (4, (2, 3, 4), 400_000, 3),
        (4, (2, 3, 7), 200_000, 3),
        (5, (4, 3, 8), 200_000, 3),
    ],
)
def test_first_tokens_follow_the_target(
    vocab_size: int, shape: tuple[int, int, int], count: int, num_tokens: int
) -> None:
    """Red when anything from float32 draws to the last draw changes the law."""
    proposer = StochasticTree(*shape)
    p_value = emitted_p_value(
        recursive_rejection, proposer, vocab_size, count, num_tokens
    )
    assert p_value > LUCK


# Other trees


def test_all_levels_kept_are_rsd_s() -> None:
    """Red when null no longer stands for every node of every frontier."""
    keys = {"method": "eagle_tree", "model": "head", "tree": "stochastic"}
    config = parse_spec_config({**keys, "top_k": 3, "depth": 3, "num_drafts": None})
    whole = config.proposer()
    assert isinstance(whole, RsdS)
    assert config.rule.name == "recursive_rejection"
    draft, _ = random_tables("random", 5, 3)
    uniforms = rand(50, whole.sizes.num_uniforms)
    sampling = plain_sampling(50)
    beams = propose(whole, draft, sampling, uniforms)
    own = StochasticTree(3, 3, 63)
    assert own.sizes.num_uniforms == whole.sizes.num_uniforms
    tree = propose(own, draft, sampling, uniforms)
    for req in range(50):
        found, read = token_paths(tree, req), token_paths(beams, req)
        # The candidates are RSD-S's nodes and their siblings, in its order.
        assert [path for path in found if path in set(read)] == read


def test_greedy_requests_get_the_dynamic_tree() -> None:
    """Red when draws reach greedy requests, alone or in a mixed batch."""
    head = tiny_head("redrafter")
    hidden, roots = step_inputs(4)
    mixed = SamplingTensors(torch.tensor([0.0, 1.0, 0.0, 0.7]))
    for shape in ((4, 3, 8), (3, 4, 20), (5, 2, 3)):
        likeliest = drafted(DynamicTree(*shape), head, hidden, roots, greedy(4))
        alone = drafted(StochasticTree(*shape), head, hidden, roots, greedy(4))
        beside = drafted(StochasticTree(*shape), head, hidden, roots, mixed)
        assert alone.draws is None
        for req in range(4):
            assert token_paths(alone, req) == token_paths(likeliest, req)
        for req in (0, 2):
            assert token_paths(beside, req) == token_paths(likeliest, req)


def test_draws_name_the_law_that_they_come_from() -> None:
    """Red when a node is judged by another node's distribution."""
    draft, _ = random_tables("random", 5, 3)
    proposer = StochasticTree(3, 3, 9)
    uniforms = rand(20, proposer.sizes.num_uniforms)
    tree = propose(proposer, draft, plain_sampling(20), uniforms)
    assert tree.draws is not None
    parents = tree.parents[:, 1:]
    law = draft.table[draft.prefixes(tree).gather(1, parents)]
    reqs = torch.arange(20)[:, None]
    assert tree.draws.probs[reqs, tree.draws.rows].equal(law)
    assert tree.draws.nodes.equal(torch.arange(1, 10).expand(20, -1))


@pytest.mark.parametrize("kind", ["random", "peaked", "one_token"])
def test_sizes_bound_the_trees(kind: str) -> None:
    """Red when a tree, or a level that is read, outgrows what is announced."""
    for top_k, depth, kept in product((1, 2, 6), (1, 2, 5), (1, 2, 5, 11, 40)):
        proposer = StochasticTree(top_k, depth, kept)
        language = random_tables(kind, 4, depth)[0]
        draft = CountingDraft(LanguageDraft(language, 8))
        root, sampling = torch.zeros(8, dtype=torch.int64), plain_sampling(8)
        uniforms = rand(8, proposer.sizes.num_uniforms)
        inputs = ProposerInputs(root, sampling, uniforms, [draft])
        check_bounds(proposer.sizes, proposer.propose(inputs), draft.widths)


def test_a_draft_vocabulary_is_kept() -> None:
    """Red when columns of a hot-token head are taken for tokens."""
    draft, _ = random_tables("random", 6, 2)
    proposer, hot = StochasticTree(2, 2, 4), torch.tensor([1, 3, 4])
    uniforms = rand(30, proposer.sizes.num_uniforms)
    tree = propose(proposer, draft, plain_sampling(30), uniforms, hot)
    assert tree.draws is not None
    assert tree.draws.vocabulary is hot
    assert bool(torch.isin(tree.token_ids[:, 1:], hot).all())
