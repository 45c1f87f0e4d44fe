"""Spec-configs of ``eagle_tree``: its trees, their rules, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.heads import HEADS, write_head
from vllm_treespec.config import SpecConfigError, parse_spec_config
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


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ({"top_k": 0}, "'top_k' is 0"),
        ({"depth": 64}, "'depth' is 64"),
        ({"num_drafts": 64}, "'num_drafts' is 64"),
        ({"beam_width": 4}, "'beam_width' is not a key of this method; remove it"),
        ({"tree": "beams"}, "'tree' is 'beams': Input should be 'dynamic', 'static'"),
        ({"hot_tokens": ""}, "'hot_tokens' is ''"),
        (
            {"num_drafts": None},
            "'num_drafts' is None: null keeps all that was drawn, and only a "
            "stochastic tree is drawn; write a number such as 8, or 'tree' 'stoch",
        ),
        ({"tree": "static", "num_drafts": None}, "write a number such as 8"),
        (
            {"tree": "stochastic", "num_drafts": None, "top_k": 9, "depth": 8},
            "the tree has 72 draft tokens and at most 63 fit; lower top_k, depth",
        ),
        (
            {"top_k": 10, "depth": 8, "num_drafts": 60},
            "the head reads 70 nodes of a tree, top_k x (depth - 1), and at most 63 "
            "fit; lower 'top_k' or 'depth'",
        ),
        (
            {"schedule": [{"batch_size": 2, "num_drafts": None}]},
            "'schedule' has an entry in which num_drafts is wrong",
        ),
        (
            {"schedule": [{"batch_size": 2, "tree": "static"}]},
            "'tree', which does not shape a eagle_tree tree; write top_k, depth, num",
        ),
    ],
)
def test_refusals_name_key_and_remedy(keys: dict[str, Any], says: str) -> None:
    """Red when a wrong key is accepted, ignored, or refused without its name."""
    with pytest.raises(SpecConfigError) as error:
        parse(**keys)
    assert says in str(error.value)
    assert "\n" not in str(error.value)


def test_largest_reading_fits() -> None:
    """Red when a head may not read as many nodes as masks hold."""
    assert parse(top_k=9, depth=8, num_drafts=60).sizes.draft_nodes == 63
    # EAGLE-2's own: 60 nodes with the root, 10 of each of 7 levels.
    assert parse(top_k=10, depth=7, num_drafts=59).sizes.draft_nodes == 60
    # Of a tree of 5 drafts no more than 5 nodes of 5 levels are read.
    assert parse(top_k=60, depth=60, num_drafts=5).sizes.draft_nodes == 20
    assert parse(top_k=20, depth=20, num_drafts=60, tree="static").sizes.max_nodes == 61
