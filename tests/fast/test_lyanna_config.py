"""Spec-configs of ``lyanna``: its trees, their rules, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from vllm_treespec.config import parse_spec_config
from vllm_treespec.config.base import MethodConfig
from vllm_treespec.proposers import DynamicTree, Lyanna, Proposer, RsdS, StochasticTree


def parse(**keys: Any) -> MethodConfig:
    """A spec-config beside the keys that it needs."""
    return parse_spec_config({"method": "lyanna", "model": "head", **keys})


def test_defaults() -> None:
    """Red when a default changes: docs, benchmarks and users rely on them."""
    config = parse()
    values = config.model_dump()
    assert (values["tree"], values["resample"]) == ("dynamic", "off")
    assert (values["resample_drafts"], values["resample_min_levels"]) == (4, 1)
    assert (config.head, config.models) == ("head", ())
    assert config.rule.name == "coupled_draw"
    trees = config.scheduled_trees()
    names = ["4x3x12", "4x1x4"]
    assert [tree.name for tree in trees] == [f"lyanna {name}" for name in names]
    again = parse_spec_config(trees[1].config.model_dump(mode="json"))
    assert again == trees[1].config, "a spec-config travels to the workers as JSON"


@pytest.mark.parametrize(
    ("keys", "kind", "rule"),
    [
        ({"tree": "dynamic"}, DynamicTree, "coupled_draw"),
        ({"tree": "stochastic"}, StochasticTree, "recursive_rejection"),
        ({"tree": "stochastic", "num_drafts": None}, RsdS, "recursive_rejection"),
    ],
)
@pytest.mark.parametrize("resample", ["off", "replace"])
def test_a_kind_of_tree_has_one_rule(
    keys: dict[str, Any], kind: type[Proposer], rule: str, resample: str
) -> None:
    """Red when likeliest tokens are judged like drawn ones, or the other way round."""
    for tree in parse(resample=resample, **keys).scheduled_trees():
        proposer = tree.config.proposer()
        assert isinstance(proposer, Lyanna)
        assert type(proposer.tree) is kind
        assert proposer.leftover is None
        assert tree.config.rule.name == rule
        assert (proposer.sizes.num_uniforms > 0) == (rule != "coupled_draw")


def test_merged_trees() -> None:
    """Red when the second part is lost, too deep, or drawn where nothing is left."""
    config = parse(resample="merge", num_drafts=8, resample_drafts=6)
    proposer = config.proposer()
    assert isinstance(proposer, Lyanna)
    assert proposer.leftover is not None
    assert config.rule.name == "coupled_draw", "its dynamic trees follow noise"
    assert (proposer.leftover.depth, proposer.leftover.num_drafts) == (2, 6)
    assert proposer.sizes.max_nodes == 1 + 8 + 6
    names = [tree.name for tree in config.scheduled_trees()]
    assert names[0] == "lyanna 4x3x8x6"
    # Of one level nothing is left.
    one = parse(resample="merge", depth=1, num_drafts=4).proposer()
    assert isinstance(one, Lyanna)
    assert one.leftover is None
    for tree in config.scheduled_trees():
        assert tree.config.sizes == tree.config.proposer().sizes


def test_a_chain_is_read_one_node_a_level() -> None:
    """Red when the engine makes room for levels that no head reads."""
    assert parse(depth=5).sizes.draft_width == 1
    assert parse(depth=5).sizes.draft_nodes == 4
