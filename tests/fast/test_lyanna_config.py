"""Spec-configs of ``lyanna``: its trees, their rules, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import PretrainedConfig

from tests.heads import write_head
from vllm_treespec.config import SpecConfigError, parse_spec_config
from vllm_treespec.config.base import MethodConfig
from vllm_treespec.config.checks import (
    check_head,
    check_head_files,
    check_weights,
    layers_read,
)
from vllm_treespec.proposers import DynamicTree, Lyanna, Proposer, RsdS, StochasticTree
from vllm_treespec.sources.base import FINAL_LAYER


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


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ({"top_k": 0}, "'top_k' is 0"),
        ({"depth": 64}, "'depth' is 64"),
        ({"num_drafts": 64}, "'num_drafts' is 64"),
        ({"resample_min_levels": 0}, "'resample_min_levels' is 0"),
        ({"hot_tokens": "x"}, "'hot_tokens' is not a key of this method; remove it"),
        ({"tree": "static"}, "'tree' is 'static': Input should be 'dynamic' or 'stoch"),
        ({"resample": True}, "Input should be 'off', 'replace' or 'merge'"),
        (
            {"num_drafts": None},
            "'num_drafts' is None: null keeps all that was drawn, and only a "
            "stochastic tree is drawn; write a number such as 12, or 'tree' 'stoch",
        ),
        (
            {"tree": "stochastic", "resample": "merge"},
            "'resample' is 'merge': a stochastic tree is drawn from one chain, and a "
            "merged one holds the likeliest tokens of two; write 'resample' 'replace', "
            "or 'tree' 'dynamic'",
        ),
        (
            {"resample": "merge", "num_drafts": 60, "top_k": 8},
            "the tree has 64 draft tokens and at most 63 fit; lower top_k, depth, "
            "num_drafts, resample_drafts",
        ),
        (
            {"schedule": [{"batch_size": 2, "resample": "off"}]},
            "'resample', which does not shape a lyanna tree; write top_k, depth, num",
        ),
    ],
)
def test_refusals_name_key_and_remedy(keys: dict[str, Any], says: str) -> None:
    """Red when a wrong key is accepted, ignored, or refused without its name."""
    with pytest.raises(SpecConfigError) as error:
        parse(**keys)
    assert says in str(error.value)
    assert "\n" not in str(error.value)


def refusal(spec: dict[str, Any]) -> str:
    """The one message with which the head of a spec-config is refused."""
    with pytest.raises(SpecConfigError) as error:
        check_head_files(parse_spec_config(spec))
    assert "\n" not in str(error.value)
    return str(error.value)


def test_wrong_folders_are_refused(tmp_path: Path) -> None:
    """Red when a folder without such a head gets as far as the worker."""
    own = write_head(tmp_path / "lyanna", "lyanna")
    eagle = write_head(tmp_path / "eagle", "eagle")
    check_head_files(parse(model=own))
    assert "holds an eagle head; write method 'eagle_tree'" in refusal(
        {"method": "lyanna", "model": eagle}
    )
    says = "holds a lyanna head; write method 'lyanna', or name the folder of an eagle"
    assert says in refusal({"method": "eagle_tree", "model": own})
    assert says.split(",")[0] in refusal({"method": "redrafter", "model": own})
    draft = parse_spec_config({"method": "sd", "model": own, "depth": 3})
    with pytest.raises(SpecConfigError, match="holds a lyanna head, not a draft"):
        check_weights(draft)
    (tmp_path / "lyanna" / "model.safetensors").unlink()
    says = "holds no model.safetensors; train it again"
    assert says in refusal({"method": "lyanna", "model": own})


@pytest.mark.parametrize(
    ("target", "says"),
    [
        ({}, None),
        ({"hidden_size": 16}, "the target 16; use a head trained for this target"),
        ({"vocab_size": 64}, "has vocab_size 32, the target 64"),
    ],
)
def test_other_targets_are_named(
    target: dict[str, int], says: str | None, tmp_path: Path
) -> None:
    """Red when a head of another target is loaded, or one of this target is not."""
    config = parse(model=write_head(tmp_path, "lyanna"))
    sizes = {"hidden_size": 64, "vocab_size": 32, "num_hidden_layers": 2, **target}
    like = PretrainedConfig(**sizes)
    assert layers_read(config, 2) == [FINAL_LAYER]
    if says is None:
        check_head(config, like)
        return
    with pytest.raises(SpecConfigError) as error:
        check_head(config, like)
    assert says in str(error.value)
    assert "treespec train lyanna" in str(error.value)
