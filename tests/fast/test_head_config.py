"""Spec-configs of heads: what they make, what they refuse, and in which words."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.heads import HEADS, write_head
from vllm_treespec.config import SpecConfigError, parse_spec_config
from vllm_treespec.config.base import MethodConfig
from vllm_treespec.plugin import expand, with_trees
from vllm_treespec.proposers import DynamicTree, Medusa, ReDrafter, RsdS


@pytest.fixture
def parse(tmp_path: Path) -> Callable[..., MethodConfig]:
    """Return a function that validates keys beside a method and its head."""

    def make(method: str, **keys: Any) -> MethodConfig:
        head = write_head(tmp_path / method, HEADS[method])
        return parse_spec_config({"method": method, "model": head, **keys})

    return make


def test_defaults(parse: Callable[..., MethodConfig]) -> None:
    """Red when a default changes: docs, benchmarks and users rely on them."""
    config = parse("redrafter")
    proposer = config.proposer()
    assert isinstance(proposer, DynamicTree)
    assert (proposer.sizes.max_nodes, config.rule.name) == (6, "coupled_draw")
    assert (config.head, config.models) == (config.model_dump()["model"], ())
    assert config.scheduled_trees()[0].name == "redrafter 4x2x5"
    medusa = parse("medusa_tree")
    assert isinstance(medusa.proposer(), Medusa)
    assert medusa.rule.name == "coupled_draw"
    assert medusa.proposer().sizes.max_nodes == 6
    assert medusa.proposer().sizes.max_depth <= 3


def test_keys_reach_the_proposer(parse: Callable[..., MethodConfig]) -> None:
    """Red when a key of a head's method is dropped on the way."""
    keys = {"beam_width": 8, "length": 6, "num_drafts": 31, "tree": "beams"}
    proposer = parse("redrafter", **keys).proposer()
    assert (proposer.num_beam_tokens, proposer.sizes.max_nodes) == (48, 32)
    assert parse("medusa_tree", num_drafts=5).proposer().sizes.max_nodes == 6


def test_stochastic_beam(parse: Callable[..., MethodConfig]) -> None:
    """Red when drawn beams are verified as if they were not, or are cut."""
    config = parse("redrafter", beam_search="stochastic", beam_width=3, length=5)
    proposer = config.proposer()
    assert isinstance(proposer, RsdS)
    assert config.rule.name == "recursive_rejection"
    assert (proposer.sizes.max_nodes, proposer.num_beam_tokens) == (16, None)


def test_dynamic_tree_of_a_recurrent_head(parse: Callable[..., MethodConfig]) -> None:
    """Red when the beams' keys do not shape the tree, or it is judged wrongly."""
    keys = {"beam_width": 6, "length": 3, "num_drafts": 12}
    config = parse("redrafter", **keys)
    proposer = config.proposer()
    assert isinstance(proposer, DynamicTree)
    assert (proposer.top_k, proposer.depth, proposer.num_drafts) == (6, 3, 12)
    assert config.rule.name == "coupled_draw"
    assert config.scheduled_trees()[0].name == "redrafter 6x3x12"
    assert all(
        isinstance(tree.config.proposer(), DynamicTree)
        for tree in config.scheduled_trees()
    )
    assert config == parse("redrafter", tree="dynamic", **keys)
    assert parse("redrafter").proposer().sizes.max_nodes == 6
    assert isinstance(parse("redrafter", tree="beams").proposer(), ReDrafter)


@pytest.mark.parametrize("method", list(HEADS))
def test_smaller_trees(method: str, parse: Callable[..., MethodConfig]) -> None:
    """Red when a measured schedule tries a tree twice, or none that is small."""
    trees = parse(method).scheduled_trees()
    sizes = [tree.config.proposer().sizes.max_nodes for tree in trees]
    assert sizes == sorted(set(sizes), reverse=True)
    weighs = parse(method).weighs_drafts
    assert weighs == (method != "medusa_tree")
    assert (len(sizes), sizes[-1]) == ((2, 5) if weighs else (3, 3))
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
