"""Spec-configs of ``eagle_tree``: its trees, their rules, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.heads import HEADS, write_head
from vllm_treespec.config import parse_spec_config
from vllm_treespec.config.base import MethodConfig
from vllm_treespec.proposers import (
    DynamicTree,
    Proposer,
    RsdS,
    StaticTree,
    StochasticTree,
)


def parse(**keys: Any) -> MethodConfig:
    """A spec-config beside the keys that it needs."""
    spec = {"method": "eagle_tree", "model": "head", **keys}
    return parse_spec_config(spec)


def test_defaults() -> None:
    """Red when a default changes: docs, benchmarks and users rely on them."""
    config = parse()
    assert isinstance(config.proposer(), DynamicTree)
    assert (config.head, config.models) == ("head", ())
    assert config.model_dump()["hot_tokens"] is None
    trees = config.scheduled_trees()
    names = ["4x3x8", "4x1x4"]
    assert [tree.name for tree in trees] == [f"eagle_tree {name}" for name in names]
    again = parse_spec_config(trees[1].config.model_dump(mode="json"))
    assert again == trees[1].config, "a spec-config travels to the workers as JSON"


@pytest.mark.parametrize(
    ("keys", "kind", "rule"),
    [
        ({"tree": "dynamic"}, DynamicTree, "coupled_draw"),
        ({"tree": "static"}, StaticTree, "coupled_draw"),
        ({"tree": "stochastic"}, StochasticTree, "recursive_rejection"),
        ({"tree": "stochastic", "num_drafts": None}, RsdS, "recursive_rejection"),
    ],
)
def test_a_kind_of_tree_has_one_rule(
    keys: dict[str, Any], kind: type[Proposer], rule: str, tmp_path: Path
) -> None:
    """Red when likeliest tokens are judged like drawn ones, or the other way round."""
    head = write_head(tmp_path, HEADS["eagle_tree"])
    for tree in parse(model=head, **keys).scheduled_trees():
        proposer = tree.config.proposer()
        assert type(proposer) is kind
        assert tree.config.rule.name == rule
        assert (proposer.sizes.num_uniforms > 0) == (rule != "coupled_draw")


def test_largest_reading_fits() -> None:
    """Red when a head may not read as many nodes as masks hold."""
    assert parse(top_k=9, depth=8, num_drafts=60).sizes.draft_nodes == 63
    # EAGLE-2's own: 60 nodes with the root, 10 of each of 7 levels.
    assert parse(top_k=10, depth=7, num_drafts=59).sizes.draft_nodes == 60
    # Of a tree of 5 drafts no more than 5 nodes of 5 levels are read.
    assert parse(top_k=60, depth=60, num_drafts=5).sizes.draft_nodes == 20
    assert parse(top_k=20, depth=20, num_drafts=60, tree="static").sizes.max_nodes == 61
