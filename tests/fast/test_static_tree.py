"""The static tree: EAGLE-1's shape, every node's own guesses, and its law."""

from __future__ import annotations

import pytest

from tests.fast.drafting import draft_of, propose, token_paths
from tests.fast.languages import random_tables
from tests.fast.test_dynamic_tree import log_law
from tests.fast.tiny_heads import check_hot, drafted, step_inputs, tiny_head
from tests.reference.proposers import static_tree_reference
from vllm_treespec.proposers import StaticTree
from vllm_treespec.proposers.static_tree import RANK_ACCURACIES

# The tree that EAGLE-1 publishes, by ranks.
EAGLE_1 = (
    "0 1 2 3 00 01 02 10 11 20 21 30 000 001 002 010 011 020 021 100 "
    "0000 0001 0002 00000 00001"
)


def test_25_drafts_are_eagle_1s_tree() -> None:
    """Red when the table no longer gives the published tree."""
    expected = [tuple(map(int, path)) for path in EAGLE_1.split()]
    assert list(StaticTree(4, 5, 25).paths) == expected
    assert list(StaticTree(10, 7, 25).paths) == expected
    assert all(sum(ranks) <= 1 for ranks in RANK_ACCURACIES)


def test_limits_of_ranks_and_levels() -> None:
    """Red when a tree reads more ranks or levels than its keys allow."""
    paths = StaticTree(2, 3, 40).paths
    assert len(paths) == 2 + 4 + 8
    assert max(map(len, paths)) == 3
    assert {rank for path in paths for rank in path} == {0, 1}
    own = StaticTree(4, 5, 4, rank_accuracies=((0.3, 0.2, 0.1), (0.9,)))
    assert own.paths == ((0,), (1,), (0, 0), (1, 0))
    with pytest.raises(ValueError, match="rank_accuracies of the head are all 0"):
        StaticTree(4, 5, 4, rank_accuracies=((0.0,),))


def test_nodes_hold_their_parents_own_guesses() -> None:
    """Red when a node gets the guess of another node, or of another rank."""
    for num_drafts in (1, 5, 8, 25, 40):
        language = random_tables("random", 5, 5)[0]
        proposer = StaticTree(4, 5, num_drafts)
        tree = propose(proposer, language, num_reqs=2)
        expected = static_tree_reference(log_law(language), proposer.paths)
        for req in range(2):
            assert token_paths(tree, req)[1:] == expected
        assert tree.num_nodes.tolist() == [1 + num_drafts] * 2
        assert tree.draws is None


def test_claims_are_products_of_accuracies() -> None:
    """Red when a node of a fixed tree claims another path's accuracy."""
    proposer = StaticTree(2, 2, 6, rank_accuracies=((0.5, 0.25), (0.75, 0.125)))
    draft = draft_of(proposer, random_tables("random", 4, 2)[0], num_reqs=2)
    assert proposer.paths == ((0,), (1,), (0, 0), (0, 1), (1, 0), (1, 1))
    assert draft.claims is not None
    expected = [0.0, 0.5, 0.25, 0.375, 0.0625, 0.1875, 0.03125]
    assert draft.claims.tolist() == [expected, expected]
    assert draft.levels == 2


def test_hot_tokens_are_drafted() -> None:
    """Red when columns of a head are taken for tokens."""
    head = tiny_head("redrafter")
    hidden, roots = step_inputs(3)
    check_hot(drafted(StaticTree(4, 4, 20), head, hidden, roots), head)
