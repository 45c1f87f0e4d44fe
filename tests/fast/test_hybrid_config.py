"""The spec-config of ``hybrid``: what it is told of its model, and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest

from vllm_treespec.config import parse_spec_config
from vllm_treespec.config.base import MethodConfig
from vllm_treespec.config.hybrid import HEAD_KINDS
from vllm_treespec.proposers import DynamicTree, Hybrid
from vllm_treespec.sources.suffix_index import SuffixIndex
from vllm_treespec.tools.sides import with_model
from vllm_treespec.trees.source import Source


def parse(**keys: Any) -> MethodConfig:
    return parse_spec_config({"method": "hybrid", "model": "some/model", **keys})


def test_keys_reach_both_parts() -> None:
    """Red when a key does not reach the part that it is for."""
    of_index = {"num_drafts": 10, "depth": 9, "min_probability": 0.3}
    of_index |= {"max_match": 7, "max_cached_tokens": 0}
    config = parse(**of_index, top_k=3, model_depth=2)
    proposer, index = config.proposer(), config.text_source()
    assert isinstance(proposer, Hybrid)
    assert (proposer.num_drafts, proposer.index.sizes.max_depth) == (10, 9)
    assert proposer.index.min_probability == 0.3
    assert isinstance(proposer.model, DynamicTree)
    assert (proposer.model.top_k, proposer.model.depth) == (3, 2)
    assert isinstance(index, SuffixIndex)
    assert (index.depth, index.max_match, index.cache.max_tokens) == (9, 7, 0)
    assert config.rule.name == "coupled_draw"
    sizes = proposer.sizes
    assert (sizes.max_nodes, sizes.max_depth, sizes.draft_depth) == (11, 9, 2)
    assert (sizes.draft_width, sizes.draft_nodes) == (3, 3)


def test_the_model_is_what_it_is_called() -> None:
    """Red when a head is loaded as a draft model, or the other way round."""
    config = parse()
    assert (config.models, config.head, config.head_kind) == (
        ("some/model",),
        None,
        None,
    )
    for kind in HEAD_KINDS:
        config = parse(drafter=kind)
        assert (config.models, config.head) == ((), "some/model")
        assert config.head_kind == kind


def test_default_schedule() -> None:
    """Red when a measured schedule cannot leave out the model, or name what it draws.

    A name is the index's part, and the model's where it has one.
    """
    trees = parse().scheduled_trees()
    assert [tree.name for tree in trees] == [
        "hybrid 32x28+draft_model 4x6",
        "hybrid 32x28",
    ]
    assert [tree.prunes_by_cost for tree in trees] == [True, True]
    both = Source.INDEX | Source.MODEL
    assert [tree.sources for tree in trees] == [both, Source.INDEX]


def test_a_schedule_may_leave_out_the_model() -> None:
    """Red when users cannot write such a schedule themselves."""
    entries = [{"batch_size": 2}, {"batch_size": 8, "model_depth": 0}]
    own, alone = parse(schedule=entries).scheduled_trees()
    assert (own.name, alone.name) == (
        "hybrid 32x28+draft_model 4x6",
        "hybrid 32x28",
    )
    assert alone.sizes.draft_nodes < own.sizes.draft_nodes


def test_benchmarks_fill_in_the_model() -> None:
    """Red when a side gets a draft model in place of its head."""
    spec = {"method": "hybrid"}
    heads = {"eagle": "head"}
    assert with_model(spec, "draft", heads)["model"] == "draft"
    spec["drafter"] = "eagle"
    assert with_model(spec, "draft", heads)["model"] == "head"
    with pytest.raises(ValueError, match="name one with --head"):
        with_model(spec, "draft", {})
