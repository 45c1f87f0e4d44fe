"""Spec-configs of heads: their defaults, trees and rules."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.heads import HEADS, write_head
from vllm_treespec.config import SpecConfigError, parse_spec_config
from vllm_treespec.config.base import MethodConfig
from vllm_treespec.plugin import expand, with_trees
from vllm_treespec.proposers import (
    DynamicTree,
    Lyanna,
    Medusa,
    Proposer,
    ReDrafter,
    RsdS,
    StaticTree,
    StochasticTree,
)


@pytest.fixture
def parse(tmp_path: Path) -> Callable[..., MethodConfig]:
    """Return a function that validates keys beside a method and its head."""

    def make(method: str, **keys: Any) -> MethodConfig:
        head = write_head(tmp_path / method, HEADS[method])
        return parse_spec_config({"method": method, "model": head, **keys})

    return make


def unread(method: str, **keys: Any) -> MethodConfig:
    """A spec-config of a head that nothing is read of."""
    return parse_spec_config({"method": method, "model": "head", **keys})


@pytest.mark.parametrize(
    ("method", "defaults", "names"),
    [
        ("eagle_tree", {"tree": "dynamic", "hot_tokens": None}, ["4x3x8", "4x1x4"]),
        ("dflash_tree", {"depth": 7}, ["8x7x16", "4x1x4"]),
        (
            "lyanna",
            {"resample": "off", "resample_drafts": 4, "resample_min_levels": 1},
            ["4x3x12", "4x1x4"],
        ),
    ],
)
def test_defaults_of_heads_that_read_pairs(
    method: str, defaults: dict[str, Any], names: list[str]
) -> None:
    """Red when a default changes: docs, benchmarks and users rely on them."""
    config = unread(method)
    assert config.model_dump().items() >= {"tree": "dynamic", **defaults}.items()
    assert (config.head, config.models) == ("head", ())
    assert config.rule.name == "coupled_draw"
    found = [tree.name for tree in config.scheduled_trees()]
    assert found == [f"{method} {name}" for name in names]


DRAWN: dict[str, Any] = {"tree": "stochastic"}


@pytest.mark.parametrize(
    ("keys", "kind", "rule"),
    [
        ({"tree": "dynamic"}, DynamicTree, "coupled_draw"),
        ({"tree": "static"}, StaticTree, "coupled_draw"),
        (DRAWN, StochasticTree, "recursive_rejection"),
        ({**DRAWN, "num_drafts": None}, RsdS, "recursive_rejection"),
    ],
)
@pytest.mark.parametrize("resample", [None, "off", "replace"])
def test_a_kind_of_tree_has_one_rule(
    keys: dict[str, Any],
    kind: type[Proposer],
    rule: str,
    resample: str | None,
    tmp_path: Path,
) -> None:
    """Red when likeliest tokens are judged like drawn ones, or the other way round."""
    if resample and kind is StaticTree:
        pytest.skip("Lyanna has no static trees")
    if resample:
        config = unread("lyanna", resample=resample, **keys)
    else:
        config = unread("eagle_tree", model=write_head(tmp_path, "eagle"), **keys)
    for tree in config.scheduled_trees():
        proposer = tree.config.proposer()
        drawn = proposer.tree if isinstance(proposer, Lyanna) else proposer
        assert isinstance(proposer, Lyanna) == bool(resample)
        assert type(drawn) is kind
        assert getattr(proposer, "leftover", None) is None
        assert tree.config.rule.name == rule
        assert (proposer.sizes.num_uniforms > 0) == (rule != "coupled_draw")


SMALL = {"beam_width": 6, "length": 3, "num_drafts": 12}
BEAMS = {"tree": "beams", "beam_width": 8, "length": 6, "num_drafts": 31}
DRAWN_BEAMS = {"beam_search": "stochastic", "beam_width": 3, "length": 5}


@pytest.mark.parametrize(
    ("method", "keys", "kind", "says", "rule"),
    [
        ("redrafter", {}, DynamicTree, {"max_nodes": 6}, "coupled_draw"),
        ("redrafter", SMALL, DynamicTree, {"max_nodes": 13}, "coupled_draw"),
        ("redrafter", BEAMS, ReDrafter, {"num_beam_tokens": 48}, "coupled_draw"),
        ("redrafter", BEAMS, ReDrafter, {"max_nodes": 32}, "coupled_draw"),
        ("redrafter", DRAWN_BEAMS, RsdS, {"max_nodes": 16}, "recursive_rejection"),
        ("redrafter", DRAWN_BEAMS, RsdS, {"num_beam_tokens": None}, None),
        ("medusa_tree", {}, Medusa, {"max_nodes": 6}, "coupled_draw"),
        ("medusa_tree", {"num_drafts": 7}, Medusa, {"max_nodes": 8}, "coupled_draw"),
    ],
)
def test_keys_make_the_proposer_and_its_rule(
    method: str,
    keys: dict[str, Any],
    kind: type[Proposer],
    says: dict[str, int | None],
    rule: str | None,
    parse: Callable[..., MethodConfig],
) -> None:
    """Red when a default changes, or a key is dropped on the way to the proposer.

    Or when drawn beams are verified as if they were not, or likeliest ones as drawn.
    """
    config = parse(method, **keys)
    proposer = config.proposer()
    assert type(proposer) is kind
    assert (config.head, config.models) == (config.model_dump()["model"], ())
    assert rule in (None, config.rule.name)
    own = {**vars(proposer.sizes), "num_beam_tokens": proposer.num_beam_tokens}
    assert {name: own[name] for name in says} == says
    if method == "medusa_tree":
        assert proposer.sizes.max_depth <= 3
    if keys is SMALL:
        assert isinstance(proposer, DynamicTree)
        assert (proposer.top_k, proposer.depth, proposer.num_drafts) == (6, 3, 12)
        assert config == parse(method, tree="dynamic", **keys)


def test_trees_of_a_recurrent_head(parse: Callable[..., MethodConfig]) -> None:
    """Red when a schedule's smaller trees, or their names, are those of beams."""
    for keys, name in (({}, "redrafter 4x2x5"), (SMALL, "redrafter 6x3x12")):
        trees = parse("redrafter", **keys).scheduled_trees()
        assert trees[0].name == name
        assert all(isinstance(tree.config.proposer(), DynamicTree) for tree in trees)


@pytest.mark.parametrize("method", list(HEADS))
def test_smaller_trees(method: str, parse: Callable[..., MethodConfig]) -> None:
    """Red when a measured schedule tries a tree twice, or none that is small."""
    trees = parse(method).scheduled_trees()
    sizes = [tree.config.proposer().sizes.max_nodes for tree in trees]
    assert sizes == sorted(set(sizes), reverse=True)
    prunes = parse(method).prunes_by_cost
    assert prunes == (method != "medusa_tree")
    assert (len(sizes), sizes[-1]) == ((2, 5) if prunes else (3, 3))
    again = parse_spec_config(trees[1].config.model_dump(mode="json"))
    assert again == trees[1].config, "a spec-config travels to the workers as JSON"


@pytest.mark.parametrize("method", list(HEADS))
def test_a_missing_head_is_refused_at_start(method: str, tmp_path: Path) -> None:
    """Red when an engine, or `treespec expand`, goes on without the head's files."""
    spec = {"method": method, "model": "/nowhere/head"}
    file = tmp_path / "spec.json"
    file.write_text(json.dumps(spec))
    arg_utils = pytest.importorskip("vllm.engine.arg_utils", reason="needs vLLM")
    args = arg_utils.EngineArgs(model="nowhere")

    def configure(_: Any) -> Any:
        raise AssertionError("an engine was configured")

    with pytest.raises(SpecConfigError, match="there is no folder /nowhere/head"):
        expand(str(file))
    with pytest.raises(SpecConfigError, match="there is no folder /nowhere/head"):
        with_trees(args, spec, configure)


@pytest.mark.parametrize(
    ("shape", "num_nodes"),
    [
        ((9, 8, 60), 63),
        # EAGLE-2's own: 60 nodes with the root, 10 of each of 7 levels.
        ((10, 7, 59), 60),
        # Of a tree of 5 drafts no more than 5 nodes of 5 levels are read.
        ((60, 60, 5), 20),
    ],
)
def test_largest_reading_fits(shape: tuple[int, ...], num_nodes: int) -> None:
    """Red when a head may not read as many nodes as masks hold."""
    keys = dict(zip(("top_k", "depth", "num_drafts"), shape, strict=True))
    assert unread("eagle_tree", **keys).sizes.draft_nodes == num_nodes
    wide = {"top_k": 20, "depth": 20, "num_drafts": 60, "tree": "static"}
    assert unread("eagle_tree", **wide).sizes.max_nodes == 61


def test_merged_trees() -> None:
    """Red when the second part is lost, too deep, or drawn where nothing is left."""
    config = unread("lyanna", resample="merge", num_drafts=8, resample_drafts=6)
    proposer = config.proposer()
    assert isinstance(proposer, Lyanna)
    assert proposer.leftover is not None
    assert config.rule.name == "coupled_draw", "its dynamic trees follow noise"
    assert (proposer.leftover.depth, proposer.leftover.num_drafts) == (2, 6)
    assert proposer.sizes.max_nodes == 1 + 8 + 6
    names = [tree.name for tree in config.scheduled_trees()]
    assert names[0] == "lyanna 4x3x8x6"
    # Of one level nothing is left.
    one = unread("lyanna", resample="merge", depth=1, num_drafts=4).proposer()
    assert isinstance(one, Lyanna)
    assert one.leftover is None
    for tree in config.scheduled_trees():
        assert tree.config.sizes == tree.config.proposer().sizes


def test_a_chain_is_read_one_node_a_level() -> None:
    """Red when the engine makes room for levels that no head reads."""
    assert unread("lyanna", depth=5).sizes.draft_width == 1
    assert unread("lyanna", depth=5).sizes.draft_nodes == 4
