"""Trees over chains: their shape, their law under each rule, and their limits."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.fast.drafting import (
    at_temperature,
    check_bounds,
    draft_of,
    draws_of,
    propose,
    same_trees,
    token_paths,
)
from tests.fast.enumeration import (
    EXACT,
    NOTICEABLE,
    ROUGH,
    Weighted,
    all_uniforms,
    as_if_drawn,
    certain,
    law_error,
    rand,
)
from tests.fast.languages import random_tables
from tests.fast.rule_forms import (
    FORMS,
    grid_law_error,
)
from tests.fast.test_dynamic_tree import log_law
from tests.fast.toy_chains import ToyChain, softmax_sampling
from tests.reference.proposers import dynamic_tree_reference
from vllm_treespec.proposers import DynamicTree, Lyanna, Proposer, RsdS, StochasticTree
from vllm_treespec.scorers import recursive_rejection
from vllm_treespec.sources.chain import ChainDraft
from vllm_treespec.trees.draft import Draft
from vllm_treespec.trees.source import Source
from vllm_treespec.trees.tree import TreeBatch

ROOT = 1


def drawn_from(
    proposer: Proposer,
    draft: ChainDraft,
    uniforms: Tensor | None = None,
    levels: Tensor | None = None,
) -> Draft:
    """One tree for each request of a chain."""
    num_reqs = len(draft.root_token_ids)
    return draft_of(
        proposer,
        draft,
        uniforms,
        softmax_sampling(num_reqs),
        num_reqs=num_reqs,
        root_token_ids=draft.root_token_ids,
        levels=levels,
    )


def chain_draft(
    chain: ToyChain, first: int | None = None, leftover: ChainDraft | None = None
) -> ChainDraft:
    """The draft of one request, of whose chain some levels are used up."""
    return ChainDraft(
        chain.levels[None],
        chain.info,
        torch.tensor([ROOT]),
        first=None if first is None else torch.tensor([first]),
        leftover=leftover,
    )


# Shape


def test_a_tree_ends_where_its_chain_does() -> None:
    """Red when a tree over what is left is not that of the levels that are left."""
    for used in range(5):
        chain = ToyChain.random(5, 4)
        for num_drafts in (1, 6, 15):
            proposer = Lyanna(DynamicTree(3, 4, num_drafts))
            tree = drawn_from(proposer, chain_draft(chain, used)).tree
            found = token_paths(tree, 0)[1:]
            if used == 4:
                assert found == []
                continue
            law = log_law(chain.left(used).language(ROOT))
            assert found == dynamic_tree_reference(law, 3, 4 - used, num_drafts)


@pytest.mark.parametrize("proposer", [StochasticTree(3, 4, 9), RsdS(3, 4)])
def test_drawn_trees_end_there_too(proposer: Proposer) -> None:
    """Red when levels that are not there are drawn, or those above change."""
    for left in range(1, 5):
        chain = ToyChain.random(5, 4)
        uniforms = rand(20, proposer.sizes.num_uniforms)
        limit = torch.full((20,), left)
        tree = drawn_from(proposer, chain.draft(ROOT, 20), uniforms, limit).tree
        assert int(tree.depths.max()) <= left
        whole = drawn_from(proposer, chain.draft(ROOT, 20), uniforms).tree
        for req in range(20):
            found, paths = token_paths(tree, req), token_paths(whole, req)
            above = [path for path in paths if len(path) <= left]
            if isinstance(proposer, RsdS):
                assert found == above
            else:
                # the budget is spent above instead
                assert set(above) <= set(found)


def test_each_request_has_levels_of_its_own() -> None:
    """Red when the batch decides how deep a request's tree is."""
    chain = ToyChain.random(5, 3)
    proposer = DynamicTree(2, 3, 9)
    draft = chain.draft(ROOT, 4)
    tree = drawn_from(proposer, draft, levels=torch.arange(4)).tree
    assert tree.depths.amax(1).tolist() == [0, 1, 2, 3]
    assert int(tree.num_nodes[0]) == 1


def merged(fresh: ToyChain, left: ToyChain, proposer: Lyanna, used: int = 1) -> Draft:
    """The tree of a fresh chain and of one of which a part is left."""
    leftover = chain_draft(left, used)
    draft = chain_draft(fresh, leftover=leftover)
    return drawn_from(proposer, draft)


def test_merged_trees_hold_both() -> None:
    """Red when a part is lost, or a fresh node gives way to one from a leftover."""
    fresh, left = ToyChain.random(5, 3, seed=1), ToyChain.random(5, 3, seed=2)
    left = replace(left, table=fresh.table)
    proposer = Lyanna(DynamicTree(3, 3, 6), DynamicTree(3, 2, 4))
    draft = merged(fresh, left, proposer)
    own = dynamic_tree_reference(log_law(fresh.language(ROOT)), 3, 3, 6)
    law = log_law(left.left(1).language(ROOT))
    other = dynamic_tree_reference(law, 3, 2, 4)
    found = token_paths(draft.tree, 0)[1:]
    assert sorted(found) == sorted({*own, *other})
    assert [path for path in found if path in own] == own
    sources = draft.on_host().sources
    assert sources is not None
    assert sources[0, : len(found)].tolist() == [
        Source.MODEL * (path in own) + Source.LEFTOVER * (path in other)
        for path in found
    ]
    nothing = merged(fresh, left, proposer, used=3)
    assert token_paths(nothing.tree, 0)[1:] == own
    sources = nothing.on_host().sources
    assert sources is not None
    assert sources[0].tolist() == [Source.MODEL] * 6 + [0] * 4


def test_replaced_trees_are_counted_whole() -> None:
    """Red when nodes of leftovers are not told from fresh ones, or roots count."""
    chain = ToyChain.random(5, 3)
    draft = ChainDraft(
        chain.levels.expand(2, -1, -1),
        chain.info,
        torch.tensor([ROOT, ROOT]),
        first=torch.tensor([0, 1]),
        reused=torch.tensor([False, True]),
    )
    drafted = drawn_from(Lyanna(DynamicTree(2, 3, 5)), draft)
    assert drafted.sources is not None
    assert drafted.sources.tolist() == [
        [0] + [source] * 5 for source in (Source.MODEL, Source.LEFTOVER)
    ]


@pytest.mark.parametrize("leftover", [False, True])
def test_sizes_bound_the_trees(leftover: bool) -> None:
    """Red when a tree outgrows what is announced."""
    for top_k, depth, kept, second in product((1, 2, 4), (1, 2, 4), (1, 5, 12), (1, 6)):
        tree = DynamicTree(top_k, depth, kept)
        two = leftover and tree.depth > 1
        other = DynamicTree(top_k, tree.depth - 1, second) if two else None
        proposer = Lyanna(tree, other)
        for seed in range(3):
            fresh, left = ToyChain.random(4, 4, seed), ToyChain.random(4, 4, seed + 9)
            found = merged(fresh, left, proposer).tree
            check_bounds(proposer.sizes, found, [1] * (tree.depth - 1))


# The law. Two levels, three tokens.

CHAIN = ToyChain.random(3, 2, seed=3)
TARGET = random_tables("random", 3, 2)[1]
LEFT = replace(ToyChain.random(3, 3, seed=4), table=CHAIN.table)


def off() -> TreeBatch:
    """A tree of a fresh chain."""
    return drawn_from(Lyanna(DynamicTree(3, 2, 6)), chain_draft(CHAIN)).tree


def replaced() -> TreeBatch:
    """A tree of what is left of a chain of three levels."""
    draft = chain_draft(LEFT, 1)
    return drawn_from(Lyanna(DynamicTree(3, 2, 5)), draft).tree


def merged_with_left() -> TreeBatch:
    """A tree of both, in which some prefixes are equal, and some left over alone."""
    draft = merged(CHAIN, LEFT, Lyanna(DynamicTree(2, 2, 4), DynamicTree(2, 2, 4)))
    sources = draft.on_host().sources
    assert sources is not None
    assert (sources == Source.LEFTOVER).any()
    assert int(draft.tree.num_nodes) < draft.tree.max_nodes
    return draft.tree


MODES = {"off": off, "replace": replaced, "merge": merged_with_left}


@pytest.mark.parametrize("mode", MODES)
def test_law_under_coupled_draw(mode: str) -> None:
    """Red when nodes, their order, or whence they come changes what is emitted.

    Likeliest tokens judged like draws must be noticed.
    """
    tree = MODES[mode]()
    for num_nodes in range(1, int(tree.num_nodes) + 1):
        for form in FORMS["coupled_draw"].values():
            assert grid_law_error(form, certain(tree).cut(num_nodes)) < EXACT
    chain = LEFT.left(1) if mode == "replace" else CHAIN
    # as long a language as there are prefixes in a tree
    longer = replace(chain, levels=torch.cat([chain.levels, chain.levels[:1]]))
    judged = certain(as_if_drawn(tree, longer.language(ROOT)))
    error = law_error(recursive_rejection, judged, TARGET, width=ROUGH)
    assert error > NOTICEABLE


def all_drawn(proposer: Any, chain: ToyChain, used: int = 0) -> Weighted:
    """Every tree that is drawn from what is left of a chain."""
    uniforms, weights = all_uniforms(proposer, [chain.left(used).language(ROOT)])
    count = len(weights)
    draft = ChainDraft(
        chain.levels.expand(count, -1, -1),
        chain.info,
        torch.full((count,), ROOT),
        first=torch.full((count,), used),
    )
    return Weighted(drawn_from(Lyanna(proposer), draft, uniforms).tree, weights)


@pytest.mark.parametrize("form", FORMS["recursive_rejection"])
@pytest.mark.parametrize(
    "proposer", [RsdS(2, 2), StochasticTree(2, 2, 4), StochasticTree(2, 2, 3)]
)
def test_law_under_recursive_rejection(proposer: Proposer, form: str) -> None:
    """Red when what a token says is in the logits and not in the draws' law.

    The levels alone must be noticed.
    """
    drawn = all_drawn(proposer, LEFT, 1)
    assert float(drawn.weights.sum()) == pytest.approx(1.0)
    rule = FORMS["recursive_rejection"][form]
    assert law_error(rule, drawn, TARGET) < EXACT
    draws = draws_of(drawn.tree)
    bare = LEFT.levels.softmax(-1)[torch.tensor([1, 2, 2])]
    tree = replace(drawn.tree, draws=replace(draws, probs=bare.expand_as(draws.probs)))
    bare_law = Weighted(tree, drawn.weights)
    assert law_error(rule, bare_law, TARGET, width=ROUGH) > NOTICEABLE


def test_greedy_requests_get_the_likeliest_nodes() -> None:
    """Red when the stochastic tree draws for a greedy request."""
    chain = ToyChain.random(6, 3)
    likeliest, drawn = (
        propose(Lyanna(proposer), chain.draft(ROOT), sampling=at_temperature(0.0))
        for proposer in (DynamicTree(3, 3, 8), StochasticTree(3, 3, 8))
    )
    assert same_trees(likeliest, drawn)
