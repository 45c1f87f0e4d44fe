"""Spec-configs of heads: what they make, what they refuse, and in which words."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import PretrainedConfig

from tests.heads import HEADS, write_head
from vllm_treespec.config import SpecConfigError, parse_spec_config
from vllm_treespec.config.base import MethodConfig
from vllm_treespec.config.checks import check_head, check_head_files, check_weights
from vllm_treespec.plugin import expand, with_trees
from vllm_treespec.proposers import DynamicTree, Medusa, ReDrafter, RsdS


@pytest.fixture
def parse(tmp_path: Path) -> Callable[..., MethodConfig]:
    """Return a function that validates keys beside a method and its head."""

    def make(method: str, **keys: Any) -> MethodConfig:
        head = write_head(tmp_path / method, HEADS[method])
        return parse_spec_config({"method": method, "model": head, **keys})

    return make


def refusal(spec: dict[str, Any]) -> str:
    """The one message with which a spec-config, or the head it names, is refused."""
    with pytest.raises(SpecConfigError) as error:
        check_head_files(parse_spec_config(spec))
    assert "\n" not in str(error.value)
    return str(error.value)


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


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ({"length": 0}, "'length' is 0"),
        ({"num_drafts": 64}, "'num_drafts' is 64"),
        ({"num_drafts": 0}, "'num_drafts' is 0"),
        ({"beams": 3}, "'beams' is not a key of this method; remove it"),
        (
            {"beam_search": "stochastic", "num_drafts": 8},
            "'num_drafts' is 8: a stochastic beam keeps all beam_width x length draft "
            "tokens; remove 'num_drafts'",
        ),
        (
            {"beam_search": "stochastic", "tree": "dynamic"},
            "'tree' is 'dynamic': a dynamic tree holds the likeliest tokens and a "
            "stochastic beam drawn ones; remove 'tree', or write 'beam_search' 'deter",
        ),
        ({"tree": "static"}, "'tree' is 'static': Input should be 'beams' or 'dynami"),
        (
            {"beam_search": "stochastic", "beam_width": 32},
            "64 draft tokens and at most 63 fit; lower beam_width, length",
        ),
        (
            {"schedule": [{"batch_size": 2, "beam_search": "stochastic"}]},
            "'beam_search', which does not shape a redrafter tree",
        ),
    ],
)
def test_wrong_keys_are_named(keys: dict[str, Any], says: str, tmp_path: Path) -> None:
    """Red when a wrong key is accepted, ignored, or refused without its name."""
    spec = {"method": "redrafter", "model": write_head(tmp_path, "redrafter"), **keys}
    assert says in refusal(spec)


def test_folders_without_head_are_refused(tmp_path: Path) -> None:
    """Red when a folder that holds no such head gets as far as the worker."""
    redrafter = write_head(tmp_path / "redrafter", "redrafter")
    medusa = write_head(tmp_path / "medusa", "medusa")
    (tmp_path / "empty").mkdir()
    draft = tmp_path / "draft"
    draft.mkdir()
    (draft / "config.json").write_text(json.dumps({"model_type": "llama"}))
    cases = {
        "/nowhere/head": "there is no folder /nowhere/head; name the folder of a head",
        str(tmp_path / "empty"): "empty holds no config.json",
        str(draft): "is not the configuration of a head",
        medusa: "holds a medusa head; write method 'medusa_tree', or name the",
    }
    for folder, says in cases.items():
        message = refusal({"method": "redrafter", "model": folder})
        assert says in message
        assert message.startswith("speculative_config 'model': ")
    other = refusal({"method": "medusa_tree", "model": redrafter})
    assert "holds a redrafter head; write method 'redrafter'" in other
    (tmp_path / "redrafter" / "model.safetensors").unlink()
    says = "holds no model.safetensors; train it again"
    assert says in refusal({"method": "redrafter", "model": redrafter})


@pytest.mark.parametrize(
    ("accuracies", "says"),
    [
        ((), "rank_accuracies of the Medusa head are missing or all 0; train it again"),
        (((0.5, 0.2),) * 4, "has 4 levels and there are 3 heads; remove the last"),
    ],
)
def test_accuracies_without_tree_are_refused(
    accuracies: tuple[tuple[float, ...], ...], says: str, tmp_path: Path
) -> None:
    """Red when a Medusa head starts whose accuracies do not fit its heads."""
    head = write_head(tmp_path, "medusa", rank_accuracies=accuracies)
    message = refusal({"method": "medusa_tree", "model": head})
    assert "rank_accuracies" in message
    assert says in message


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


def test_head_is_no_draft_model(tmp_path: Path) -> None:
    """Red when a head given as a draft model is only found out by a crash."""
    head = write_head(tmp_path, "redrafter")
    config = parse_spec_config({"method": "sd", "model": head, "depth": 3})
    with pytest.raises(SpecConfigError, match="holds a redrafter head, not a draft"):
        check_weights(config)


@pytest.mark.parametrize(
    ("target", "says"),
    [
        ({}, None),
        ({"hidden_size": 16}, "has hidden_size 8, the target 16"),
        ({"vocab_size": 64}, "has vocab_size 32, the target 64"),
        ({"word_embed_proj_dim": 4}, "embeddings (4) and hidden states (8) differ"),
    ],
)
def test_other_targets_are_named(
    target: dict[str, int], says: str | None, parse: Callable[..., MethodConfig]
) -> None:
    """Red when a head of another target is loaded, or one of this target is not."""
    sizes = {"hidden_size": 8, "vocab_size": 32, **target}
    like = PretrainedConfig(**sizes)
    if says is None:
        check_head(parse("redrafter"), like)
        return
    with pytest.raises(SpecConfigError) as error:
        check_head(parse("redrafter"), like)
    assert says in str(error.value)
