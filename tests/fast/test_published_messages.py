"""Published heads that are refused, and in which words."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.fast.tables import rows
from tests.heads import write_draft
from tests.published_heads import PublishedHead
from vllm_treespec.config import SpecConfigError, parse_spec_config
from vllm_treespec.config.checks import check_hot_tokens
from vllm_treespec.heads import (
    HeadError,
    head_folder,
    load_eagle_head,
    save_head,
)
from vllm_treespec.heads.checkpoint import INDEX
from vllm_treespec.plugin import expand

HOT = PublishedHead(draft_vocab_size=12)
SPECULATORS = PublishedHead("speculators")


def refusal(folder: Path | str, **options: Any) -> str:
    """The one message with which a head is refused."""
    with pytest.raises(HeadError) as error:
        load_eagle_head(folder, **options)
    assert "\n" not in str(error.value)
    return str(error.value)


WRITTEN = {
    "eagle3": HOT,
    "speculators": SPECULATORS,
    "all-tokens": PublishedHead(),
    "last-layer": PublishedHead(use_aux_hidden_state=False),
    "eagle": PublishedHead("eagle", lm_head=False),
    "normed": PublishedHead(fc_norm=True),
}
# A head and keys of its config.json; null: it has no such key.
CONFIGURATIONS = rows("""
speculators {"speculators_model_type": "eagle"} => heads of 'speculators_model_type'
    'eagle' are not supported; use one of type 'eagle3'
speculators {"speculators_model_type": "peagle"} => 'peagle' are not
speculators {"transformer_layer_config": null} => 'transformer_layer_config' is missing
speculators {"transformer_layer_config": {"model_type": "gemma2"}} => model_type: Input
    should be 'llama'
eagle3 {"hidden_act": "gelu"} => hidden_act: Input should be 'silu'
eagle3 {"hidden_size": null} => hidden_size: Field required
eagle3 {"num_attention_heads": true} => num_attention_heads: Input should
eagle3 {"num_attention_heads": 0} => num_attention_heads: Input should be
eagle3 {"num_attention_heads": 3} => 3 attention heads are no multiple of 2
eagle3 {"num_key_value_heads": 0} => num_key_value_heads: Input should be
eagle3 {"head_dim": null, "num_attention_heads": 100} => head_size: Input sho
eagle3 {"head_dim": 5} => pairs of numbers, and an attention head has 5
eagle3 {"draft_vocab_size": 0} => draft_vocab_size: Input should be great
eagle3 {"draft_vocab_size": 10} => 'd2t' has 12 rows and 'draft_vocab_siz
eagle3 {"draft_vocab_size": 99} => 99 is more than 'vocab_size' 40
all-tokens {"draft_vocab_size": 10} => 'draft_vocab_size' is 10 and 'vocab_size' 40, but
    the weights have no
eagle3 {"norm_output": 1} => norm_output: Input should be a valid boolean
eagle3 {"treespec": {"deph": 1}} => treespec: deph: Extra inputs are not
eagle3 {"treespec": {"rank_accuracies": [[1.5]]}} => treespec: rank_accuracies: 0: 0:
    Input should be less than or equal to 1
eagle3 {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [-1]}} =>
    eagle_aux_hidden_state_layer_ids: 0: Input should be greater than
eagle3 {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 5]}} => 'fc.weight'
    reads 48 numbers, which are not 2 hidden states of 16; correct
    'eagle_aux_hidden_state_layer_ids' or 'target_hidden_size'
eagle3 {"rope_scaling": {"type": "dynamic", "factor": 2.0}} => rotary embeddings of type
    'dynamic' with partial_rotary_factor 1.0 are not supported; supported are default,
    linear, llama3, yarn
eagle3 {"rope_parameters": {"rope_type": "longrope"}} => type 'longrope'
eagle3 {"rope_scaling": {"type": "llama3"}} => Missing required keys
eagle3 {"partial_rotary_factor": 0.5} => partial_rotary_factor 0.5 are
eagle3 {"layer_types": ["sliding_attention"]} => 'sliding_attention' in 'layer_types'
    are not supported; use another head
eagle3 {"target_hidden_size": 20} => which are not 3 hidden states of 20
last-layer {"target_hidden_size": 20} => 'target_hidden_size' 20 is not 'hidden_size'
    16
eagle3 {"intermediate_size": 23} => midlayer.mlp.gate_proj.weight has the shape [24,
    16], and config.json says [23, 16]; correct it, train
eagle {"hidden_size": 8} => fc.weight has the shape
eagle3 {"fc_norm": true} => missing fc_norm.0.weight, fc_norm.1.weight
normed {"fc_norm": null} => not known fc_norm.0.w
""")


@pytest.mark.parametrize(("given", "says"), CONFIGURATIONS)
def test_wrong_configurations(given: str, says: str, tmp_path: Path) -> None:
    """Red when a head is read as what it is not, or refused without the reason."""
    name, keys = given.split(" ", 1)
    head = replace(WRITTEN[name], keys=json.loads(keys))
    message = refusal(head.write(tmp_path))
    assert says in message
    assert str(tmp_path) in message


def change(folder: Path, edit: Callable[[dict[str, Tensor]], Any]) -> Path:
    """Write the weights again, edited."""
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize(
    ("edit", "says"),
    [
        (lambda t: t.pop("norm.weight"), "missing norm.weight, not known none"),
        (
            lambda t: t.update({"midlayer.self_attn.o_proj.bias": torch.ones(16)}),
            "missing none, not known midlayer.self_attn.o_proj.bias",
        ),
        (
            lambda t: t.update({"layers.0.hidden_norm.weight": torch.ones(16)}),
            "missing none, not known layers.0.hidden_norm.weight",
        ),
        (lambda t: t.update(d2t=t["d2t"] + 40), "leads to tokens 4"),
        (lambda t: t.update(d2t=-torch.arange(12)), "names a token twice"),
        (lambda t: t.update(t2d=~t["t2d"]), "marks other tokens than 'd2t' names"),
        (lambda t: t.update({"lm_head.weight": torch.zeros(9, 16)}), "has 9 rows and"),
        (lambda t: t.update(d2t=t["d2t"][:, None]), "'d2t' in"),
        (lambda t: t.update(d2t=t["d2t"].float()), "is torch.float32 [12], no list of"),
        (lambda t: t.update(d2t=t["d2t"][:0]), "'d2t' beside it has the shape [0]"),
        (lambda t: t.update(d2t=torch.tensor(1)), "'d2t' beside it has the shape []"),
        (lambda t: t.update(t2d=t["t2d"][None]), "is torch.bool [1, 40], no list of"),
        (
            lambda t: t.update({"norm.weight": torch.ones(16, dtype=torch.int32)}),
            "norm.weight is torch.int32, and weights are floating-point numbers",
        ),
        (
            lambda t: t.update({"norm.weight": torch.ones(16).to(torch.float8_e4m3fn)}),
            "norm.weight is torch.float8_e4m3fn, and weights are floating-point",
        ),
        (lambda t: t["norm.weight"].fill_(torch.inf), "norm.weight holds NaN or infin"),
        (lambda t: t["lm_head.weight"][3].fill_(torch.nan), "lm_head.weight holds NaN"),
        (
            lambda t: (t.pop("midlayer.hidden_norm.weight"), t.pop("fc.weight")),
            "the weights beside it are not those of an EAGLE head",
        ),
    ],
)
def test_wrong_weights(
    edit: Callable[[dict[str, Tensor]], Any], says: str, tmp_path: Path
) -> None:
    """Red when weights are left out, made up, or given to the wrong tokens."""
    message = refusal(change(HOT.write(tmp_path), edit))
    assert says in message
    assert str(tmp_path) in message


def test_files_that_are_missing(tmp_path: Path) -> None:
    """Red when a missing file is a traceback, or the remedy is not named."""
    folder = HOT.write(tmp_path / "head")
    weights = folder / "model.safetensors"
    (folder / INDEX).write_text(json.dumps({"weight_map": {"x": "y.safetensors"}}))
    assert "there is no file 'y.safetensors' beside it; copy" in refusal(folder)
    (folder / INDEX).write_text("{}")
    assert "lists no files; copy the folder again" in refusal(folder)
    (folder / INDEX).unlink()
    weights.write_bytes(weights.read_bytes()[:-9])
    assert "is cut short" in refusal(folder)
    weights.unlink()
    says = f"or copy it whole (`treespec convert-head {folder} OUT` makes one of"
    assert f"holds no model.safetensors; train it again, {says}" in refusal(folder)


def test_heads_on_the_hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Red when a head on the hub is not fetched, or its error fills the screen."""
    from vllm_treespec.heads import checkpoint

    fetched = []

    def fetch(model: str, allow_patterns: list[str]) -> str:
        fetched.append((model, *allow_patterns))
        if model == "no/network":
            raise FileNotFoundError("no snapshot\nno network")
        return str(HOT.write(tmp_path))

    monkeypatch.setattr(checkpoint, "snapshot_download", fetch)
    assert load_eagle_head("authors/their-head").config.num_hot_tokens == 12
    files = ("config.json", "*.safetensors", "*.safetensors.index.json")
    patterns = (*files, checkpoint.MASK_FILE)
    assert fetched == [("authors/their-head", *patterns)]
    says = "there is no folder no/network, and the hub gave no head of that name (no "
    assert says in refusal("no/network")
    monkeypatch.undo()
    with pytest.raises(HeadError, match="a/b/c, and it is no hub id either"):
        head_folder("a/b/c")


HOT_LISTS = [
    (None, "is no JSON list of token ids (No such file"),
    ("{", "is no JSON list of token ids (Invalid JSON"),
    ("[-1]", "is no JSON list of token ids (0: Input should be greater than"),
    ("[]", "must name tokens below 40, the size of the vocabulary, and at least one"),
    ("[3, 40]", "must name tokens below 40, the size of the vocabulary"),
]


@pytest.mark.parametrize(("content", "says"), HOT_LISTS)
def test_wrong_hot_tokens(content: str | None, says: str, tmp_path: Path) -> None:
    """Red when a wrong list is taken, or found out in the middle of a step only."""
    file = tmp_path / "hot.json"
    if content is not None:
        file.write_text(content)
    head = PublishedHead("eagle").write(tmp_path / "head")
    message = refusal(head, hot_tokens=file)
    assert message.startswith(f"'hot_tokens': {file} ")
    assert says in message
    draft = write_draft(tmp_path / "draft")
    named = {"method": "sd", "model": str(draft), "hot_tokens": str(file)}
    with pytest.raises(SpecConfigError, match=re.escape(says)):
        check_hot_tokens(parse_spec_config(named), 40)
    (draft / "hot_tokens.json").write_text("[1, 2]")
    check_hot_tokens(parse_spec_config({"method": "sd", "model": str(draft)}), 40)
    if content == "[3, 40]":
        return
    for method, model in (("sd", draft), ("hybrid", draft), ("eagle_tree", head)):
        given = json.dumps(named | {"method": method, "model": str(model)})
        with pytest.raises(SpecConfigError, match=re.escape(f"'hot_tokens': {file}")):
            expand(given)


def test_hot_tokens_are_not_given_twice(tmp_path: Path) -> None:
    """Red when a head's own draft vocabulary is cut by other hot tokens."""
    (tmp_path / "hot.json").write_text("[1]")
    message = refusal(HOT.write(tmp_path / "head"), hot_tokens=tmp_path / "hot.json")
    assert "a draft vocabulary of its own (12 tokens); remove 'hot_tokens'" in message


def test_heads_that_no_form_can_say(tmp_path: Path) -> None:
    """Red when a head is written that would be read as another."""
    folder = PublishedHead("speculators", layer_ids=(1, 3, 4)).write(tmp_path)
    with pytest.raises(HeadError, match="no published form says"):
        save_head(load_eagle_head(folder), tmp_path / "out")
    assert not (tmp_path / "out").exists()
