"""Files that cannot be used: one message names the file and the remedy."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, LlamaConfig
from typer.testing import CliRunner

from tests.heads import HEADS, write_head
from vllm_treespec.cli import app
from vllm_treespec.config import SpecConfigError, parse_spec_config
from vllm_treespec.config.checks import (
    check_head_files,
    check_hot_tokens,
    check_weights,
    read_config,
)
from vllm_treespec.heads import HeadError, load_head, read_head_config

SIZES = {
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 32,
    "max_position_embeddings": 128,
}
CONFIG = LlamaConfig(architectures=["LlamaForCausalLM"], **SIZES).to_dict()


def without(key: str) -> str:
    """The configuration of a draft model, with one key left out."""
    return json.dumps({k: v for k, v in CONFIG.items() if k != key})


@pytest.fixture
def draft(tmp_path: Path) -> Path:
    """Folder of a draft model whose weights are one matrix."""
    folder = tmp_path / "draft"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    save_file({"weight": torch.zeros(64, 64)}, folder / "model.safetensors")
    return folder


def refusal(folder: Path) -> str:
    """The one message with which a draft model's folder is refused."""
    with pytest.raises(SpecConfigError) as error:
        check_weights(parse_spec_config({"method": "sd", "model": str(folder)}))
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("{", "is no JSON list of token ids"),
        ("[]", "must name tokens below 32"),
        ("[31, 32]", "must name tokens below 32"),
    ],
)
def test_odd_hot_tokens_of_a_draft_model(
    content: str, says: str, draft: Path, tmp_path: Path
) -> None:
    """Red when a wrong list is found out in the middle of a step only."""
    (tmp_path / "hot.json").write_text(content)
    (draft / "hot_tokens.json").write_text("[1, 2]")
    spec = {"method": "sd", "model": str(draft)}
    check_hot_tokens(parse_spec_config(spec), 32)
    named = parse_spec_config({**spec, "hot_tokens": str(tmp_path / "hot.json")})
    with pytest.raises(SpecConfigError, match=f"hot.json {says}"):
        check_hot_tokens(named, 32)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"{", "is not JSON"),
        (b"", "is not JSON"),
        (b'{"model_type": "\xff"}', "is not JSON"),
        (b"[1, 2]", "holds no JSON object"),
        (b"null", "holds no JSON object"),
        (without("vocab_size").encode(), "says no vocab_size; add it"),
        (without("num_hidden_layers").encode(), "says no num_hidden_layers; add it"),
        (
            json.dumps({**CONFIG, "num_attention_heads": 0}).encode(),
            "says num_attention_heads 0, which must be 1 or more",
        ),
        (b"[" * 100_000, "is not JSON"),
    ],
)
def test_odd_configuration_of_a_draft_model(
    content: bytes, says: str, draft: Path
) -> None:
    """Red when a broken config.json is a traceback, or a missing key a default."""
    (draft / "config.json").write_bytes(content)
    message = refusal(draft)
    assert says in message
    assert str(draft / "config.json") in message


@pytest.mark.parametrize(
    "change",
    [{"vocab_size": "many"}, {"vocab_size": None}, {"model_type": "no such type"}],
)
def test_configuration_that_transformers_refuses(
    change: dict[str, Any], draft: Path
) -> None:
    """Red when transformers' own words reach users without the name of the file."""
    (draft / "config.json").write_text(json.dumps({**CONFIG, **change}))
    with pytest.raises(SpecConfigError) as error:
        read_config("'model'", str(draft), AutoConfig.from_pretrained)
    assert f"'model': {draft / 'config.json'} cannot be read" in str(error.value)
    assert "\n" not in str(error.value)


def cut(path: Path) -> None:
    """Leave the last quarter of a file away."""
    content = path.read_bytes()
    path.write_bytes(content[: len(content) * 3 // 4])


def test_truncated_weights_of_a_draft_model(draft: Path) -> None:
    """Red when weights cut short by a broken copy are only found out by the worker."""
    check_weights(parse_spec_config({"method": "sd", "model": str(draft)}))
    cut(draft / "model.safetensors")
    message = refusal(draft)
    assert f"{draft / 'model.safetensors'} is cut short" in message
    assert "copy or save the draft model again" in message


def test_whole_numbers_are_no_weights_of_a_draft_model(draft: Path) -> None:
    """Red when whole numbers are read as weights, or int8 with scales is refused."""
    weights = {"model.norm.weight": torch.ones(8, dtype=torch.int8)}
    save_file(weights, draft / "model.safetensors")
    message = refusal(draft)
    assert f"{draft} are whole numbers (model.norm.weight), and" in message
    assert "`treespec shrink` makes one in int8" in message
    quantised = {**CONFIG, "quantization_config": {"quant_method": "gptq"}}
    (draft / "config.json").write_text(json.dumps(quantised))
    check_weights(parse_spec_config({"method": "sd", "model": str(draft)}))


@pytest.mark.parametrize(
    ("edit", "says"),
    [
        (lambda t, name: t.pop(name), "missing "),
        (lambda t, name: t.update(surplus=t[name]), "not known surplus"),
        (lambda t, name: t.update({name: t[name][:-1]}), "weight has the shape ["),
        (lambda t, name: t.update({name: t[name].int()}), "weight holds whole numbers"),
    ],
)
@pytest.mark.parametrize("method", HEADS)
def test_weights_of_a_head_that_do_not_fit(
    method: str,
    edit: Callable[[dict[str, Tensor], str], Any],
    says: str,
    tmp_path: Path,
) -> None:
    """Red when a head starts with fresh weights, or with others than its own."""
    spec = {"method": method, "model": write_head(tmp_path, HEADS[method])}
    check_head_files(parse_spec_config(spec))
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    name = max(name for name in tensors if tensors[name].dim() == 2)
    edit(tensors, name)
    save_file({n: tensor.clone() for n, tensor in tensors.items()}, file)
    with pytest.raises(SpecConfigError) as error:
        check_head_files(parse_spec_config(spec))
    assert "\n" not in str(error.value)
    assert str(tmp_path) in str(error.value)
    assert "fit its config.json: " in str(error.value)
    assert says in str(error.value)
    named = "surplus" if "surplus" in says else name.removeprefix("midlayer.")
    assert named in str(error.value)


def test_truncated_weights_of_a_head(tmp_path: Path) -> None:
    """Red when a head's broken file is a traceback, at start-up or in training."""
    head = write_head(tmp_path, "redrafter")
    cut(tmp_path / "model.safetensors")
    says = f"{tmp_path / 'model.safetensors'} is cut short"
    with pytest.raises(SpecConfigError) as error:
        check_head_files(parse_spec_config({"method": "redrafter", "model": head}))
    assert says in str(error.value)
    assert "copy the head again, or train it again" in str(error.value)
    with pytest.raises(HeadError) as head_error:
        load_head(tmp_path)
    assert says in str(head_error.value)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"vocab_size": 32', '"vocab_size": true'),
        ('"depth": 3', '"depth": 3.0'),
        ("0.5", "NaN"),
        ("0.5", "Infinity"),
        ("0.5", "1.5"),
        ("{", "\xff"),
    ],
)
def test_odd_configuration_of_a_head(old: str, new: str, tmp_path: Path) -> None:
    """Red when a number that cannot be is taken, or the file is not named."""
    write_head(tmp_path, "medusa")
    file = tmp_path / "config.json"
    text = file.read_text()
    assert old in text
    file.write_bytes(text.replace(old, new, 1).encode("latin-1"))
    with pytest.raises(HeadError) as error:
        read_head_config(tmp_path)
    assert str(file) in str(error.value)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ('{"method": "sd"}'.encode("utf-16"), "is not UTF-8 text"),
        (b'{"a": NaN}', "NaN is no number of JSON's"),
        (b'{"max_trees": Infinity}', "Infinity is no number of JSON's"),
        (b"{", "is not JSON"),
        (b"[]", "must hold one JSON object"),
    ],
)
@pytest.mark.parametrize("command", [["expand"], ["soak", "--spec"]], ids=str)
def test_spec_files(
    command: list[str], content: bytes, says: str, tmp_path: Path
) -> None:
    """Red when a spec file that cannot be read is a traceback, or is not named."""
    file = tmp_path / "spec.json"
    file.write_bytes(content)
    done = CliRunner().invoke(app, [*command, str(file)])
    assert done.exit_code == 1
    assert says in done.stderr
    assert str(file) in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_target_of_expand_is_named(tmp_path: Path) -> None:
    """Red when `treespec expand --target` of a wrong folder is a traceback."""
    file = tmp_path / "spec.json"
    file.write_text('{"method": "suffix_tree"}')
    done = CliRunner().invoke(app, ["expand", str(file), "--target", "/nope"])
    assert done.exit_code == 1
    assert "--target: the configuration of /nope cannot be read" in done.stderr
    assert "name the folder" in done.stderr


def test_folder_of_assets_is_named(tmp_path: Path) -> None:
    """Red when a folder that cannot be made is a traceback."""
    (tmp_path / "file").touch()
    folder = tmp_path / "file" / "models"
    done = CliRunner().invoke(app, ["assets", "--dir", str(folder)])
    assert done.exit_code == 1
    assert f"{folder} cannot be made" in done.stderr
    assert "--dir" in done.stderr
