"""The drawn dynamic tree: its draws, its cuts, and what it is beside other trees."""

from __future__ import annotations

import torch

from tests.fast.drafting import propose, token_paths
from tests.fast.enumeration import rand
from tests.fast.languages import random_tables
from tests.fast.tiny_heads import drafted, step_inputs, tiny_head
from vllm_treespec.config import parse_spec_config
from vllm_treespec.proposers import DynamicTree, RsdS, StochasticTree
from vllm_treespec.sampling.laws import SamplingTensors


def test_only_whole_trees_keep_their_draws() -> None:
    """Red when a cut that removes no node of a smaller tree looks at its size."""
    draft, _ = random_tables("one_token", 3, 2)
    proposer = StochasticTree(2, 2, 5)
    uniforms = rand(3, proposer.sizes.num_uniforms)
    tree = propose(proposer, draft, uniforms)
    assert int(tree.num_nodes.max()) < tree.max_nodes == 6
    for limit, kept in ((6, True), (5, False), (64, True)):
        draws = tree.cut(torch.full((3,), limit)).draws
        assert draws is not None
        assert bool(draws.nodes.any()) == kept


def test_all_levels_kept_are_rsd_s() -> None:
    """Red when null no longer stands for every node of every frontier."""
    keys = {"method": "eagle_tree", "model": "head", "tree": "stochastic"}
    config = parse_spec_config({**keys, "top_k": 3, "depth": 3, "num_drafts": None})
    whole = config.proposer()
    assert isinstance(whole, RsdS)
    assert config.rule.name == "recursive_rejection"
    draft, _ = random_tables("random", 5, 3)
    uniforms = rand(50, whole.sizes.num_uniforms)
    beams = propose(whole, draft, uniforms)
    own = StochasticTree(3, 3, 63)
    assert own.sizes.num_uniforms == whole.sizes.num_uniforms
    tree = propose(own, draft, uniforms)
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
        likeliest = drafted(DynamicTree(*shape), head, hidden, roots)
        alone = drafted(StochasticTree(*shape), head, hidden, roots)
        beside = drafted(StochasticTree(*shape), head, hidden, roots, mixed)
        assert alone.draws is None
        for req in range(4):
            assert token_paths(alone, req) == token_paths(likeliest, req)
        for req in (0, 2):
            assert token_paths(beside, req) == token_paths(likeliest, req)
