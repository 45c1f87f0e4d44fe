"""Files that cannot be used: one message names the file and the remedy."""

import json
import re
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
from tests.published_heads import PublishedHead
from vllm_treespec import __version__
from vllm_treespec.cli import app
from vllm_treespec.config import METHODS, SpecConfigError, parse_spec_config
from vllm_treespec.config.checks import (
    check_head_files,
    check_hot_tokens,
    check_weights,
)
from vllm_treespec.config.reading import read_config
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
# What reads a spec-config, given as text or as a file.
COMMANDS = [
    ["expand"],
    ["soak", "--spec"],
    ["plan", "TARGET", "--gpu-memory", "8GiB", "--speculative-config"],
]
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


@pytest.mark.parametrize("content", [None, "{", "[]"])
@pytest.mark.parametrize("method", ["sd", "hybrid", "eagle_tree"])
def test_hot_tokens_are_read_by_expand(
    method: str, content: str | None, draft: Path, tmp_path: Path
) -> None:
    """Red when `expand` prints arguments with which an engine would not start."""
    file = tmp_path / "hot.json"
    if content is not None:
        file.write_text(content)
    model = str(draft)
    if method == "eagle_tree":
        model = str(PublishedHead().write(tmp_path / "head"))
    spec = {"method": method, "model": model, "hot_tokens": str(file)}
    done = CliRunner().invoke(app, ["expand", json.dumps(spec)])
    assert done.exit_code == 1
    assert f"'hot_tokens': {file}" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_commands_say_what_they_are() -> None:
    """Red when a method is left out of the list, or an option is missing."""
    done = CliRunner().invoke(app, ["methods"])
    assert done.exit_code == 0
    lines = done.stdout.splitlines()
    assert [line.split()[0] for line in lines] == list(METHODS)
    assert all(" Needs " in line for line in lines)
    assert CliRunner().invoke(app, ["--version"]).stdout == f"treespec {__version__}\n"
    for command in ([], ["expand"], ["train"], ["train", "draft"], ["batch"]):
        done = CliRunner().invoke(app, [*command, "-h"])
        assert done.exit_code == 0
        assert "Usage: " in done.stdout


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"{", "is not JSON"),
        (b"", "is not JSON"),
        (b'{"model_type": "\xff"}', "is not JSON"),
        (b"[1, 2]", "holds no JSON object"),
        pytest.param(b"[" * 100_000, "are nested too deeply", id="deep"),
        (b"null", "holds no JSON object"),
        (without("vocab_size").encode(), "says no vocab_size; add it"),
        (without("num_hidden_layers").encode(), "says no num_hidden_layers; add it"),
        (
            json.dumps({**CONFIG, "num_attention_heads": 0}).encode(),
            "says num_attention_heads 0; correct it",
        ),
        (json.dumps({**CONFIG, "n_layer": 0}).encode(), "says n_layer 0; correct it"),
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
    [
        {"vocab_size": "many"},
        {"vocab_size": None},
        {"model_type": "no such type"},
    ],
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
        (
            lambda t, name: t.pop(name),
            r"missing \S+\.weight|is missing;",
        ),
        (
            lambda t, name: t.update(surplus=t[name]),
            r"missing none, not known surplus|surplus is not known",
        ),
        (lambda t, name: t.update({name: t[name][:-1]}), r"weight has the shape \["),
        (
            lambda t, name: t.update({name: t[name].int()}),
            r"weight is torch\.int32, and weights are",
        ),
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
    assert re.search(says, str(error.value))
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
    ("edit", "says"),
    [
        (lambda t, name: t.update({name: t[name][:-1]}), "has the shape ["),
        (
            lambda t, name: t.update({name: t[name].int()}),
            "is torch.int32, and",
        ),
        (lambda t, name: t[name].fill_(torch.nan), "holds NaN or infinity; copy the"),
        (lambda t, name: t[name].fill_(-torch.inf), "holds NaN or infinity; copy the"),
        (lambda t, name: t.pop(name), "is missing; copy the head again, or train it"),
    ],
)
def test_odd_weights_of_a_head(edit: Any, says: str, tmp_path: Path) -> None:
    """Red when weights that no head of this config.json has are loaded."""
    write_head(tmp_path, "redrafter")
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    name = next(name for name, tensor in tensors.items() if tensor.ndim == 2)
    edit(tensors, name)
    save_file(tensors, file)
    with pytest.raises(HeadError) as error:
        load_head(tmp_path)
    message = f"{file} does not fit its config.json: {name} {says}"
    assert message in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"vocab_size": 32', '"vocab_size": true'),
        ('"depth": 3', '"depth": 3.0'),
        ("0.5", "NaN"),
        ("0.5", "Infinity"),
        ("0.5", "1.5"),
        ("{", "\xff"),
        pytest.param("{", "[" * 100_000, id="deep"),
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
        (b"[]", "holds no JSON object"),
        (b'{"a": ' + b"[" * 9999 + b"]" * 9999 + b"}", "nested too deeply"),
    ],
)
@pytest.mark.parametrize("command", COMMANDS, ids=str)
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


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ("{", "is not JSON"),
        ("[]", "is no JSON object; write one such as"),
        ('{"a": NaN}', "NaN is no number of JSON's"),
        ('{"a": ' + "[" * 9999 + "]" * 9999 + "}", "nested too deeply"),
        ("nowhere.json", "there is no file nowhere.json; name a JSON file"),
        ("x" * 4000, "xx...xx"),
        ('{"method": "ngram"}', "a method of vLLM's own"),
    ],
)
@pytest.mark.parametrize("command", COMMANDS, ids=str)
def test_spec_configs_as_text(command: list[str], given: str, says: str) -> None:
    """Red when a command takes files alone, or wrong text is a traceback."""
    done = CliRunner().invoke(app, [*command, given])
    assert done.exit_code == 1
    assert says in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert len(done.stderr) < 500


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("/nowhere/model", "there is no folder /nowhere/model"),
        ("./model", "there is no folder ./model"),
        ("~/model", "there is no folder ~/model (only a shell replaces ~"),
        ("my model", "there is no folder my model, and it is no hub id either"),
        ("models/llama/8b", "there is no folder models/llama/8b, and it is no hub id"),
        ("/" + "x" * 4000, "there is no folder /xx"),
        ("x" * 4000, "there is no folder xx"),
    ],
)
@pytest.mark.parametrize("role", ["target", "sd", "eagle_tree"])
@pytest.mark.parametrize("command", ["expand", "plan", "doctor"])
def test_wrong_names_of_models(
    command: str, role: str, name: str, says: str, draft: Path
) -> None:
    """Red when a wrong name is a traceback, or the hub's words about its own ids."""
    assert says in refused(command, role, name, draft)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, "holds no config.json; name the folder"),
        ({"num_attention_heads": 0}, "config.json says num_attention_heads 0; correct"),
        ({"num_key_value_heads": -1}, "config.json says num_key_value_heads -1"),
        ({"model_type": "odd"}, "has model type `odd` but Transformers does not"),
        ("{", "config.json is not JSON ("),
        ('{"a": ' + "[" * 9999 + "]" * 9999 + "}", "nested too deeply"),
    ],
)
@pytest.mark.parametrize("role", ["target", "sd"])
@pytest.mark.parametrize("command", ["expand", "plan", "doctor"])
def test_odd_folders_of_models(
    command: str, role: str, content: Any, says: str, draft: Path, tmp_path: Path
) -> None:
    """Red when a folder is a traceback, or the advice breaks vLLM's own versions."""
    odd = tmp_path / "odd"
    odd.mkdir()
    if content is not None:
        text = json.dumps(CONFIG | content) if isinstance(content, dict) else content
        (odd / "config.json").write_text(text)
        save_file({}, odd / "model.safetensors")
    message = refused(command, role, str(odd), draft)
    assert says in message
    assert str(odd) in message
    assert "upgrade" not in message


def refused(command: str, role: str, name: str, draft: Path) -> str:
    """The line with which a command refuses a model, given as target or to a method."""
    target = name if role == "target" else str(draft)
    spec = {"method": role, "model": name}
    text = json.dumps({"method": "suffix_tree"} if role == "target" else spec)
    arguments = {
        "expand": [text, "--target", target],
        "plan": [target, "--gpu-memory", "8GiB", "--speculative-config", text],
        "doctor": ["--target", target, "--speculative-config", text],
    }[command]
    done = CliRunner().invoke(app, [command, *arguments], env={"COLUMNS": "9999"})
    assert done.exit_code == 1
    lines = (done.stdout if command == "doctor" else done.stderr).splitlines()
    line = next(line for line in lines if line.startswith(("refused: ", "treespec")))
    assert len(line) < 500
    return line


def test_folder_of_assets_is_named(tmp_path: Path) -> None:
    """Red when a folder that cannot be made is a traceback."""
    (tmp_path / "file").touch()
    folder = tmp_path / "file" / "models"
    done = CliRunner().invoke(app, ["assets", "--dir", str(folder)])
    assert done.exit_code == 1
    assert f"{folder} cannot be made" in done.stderr
    assert "--dir" in done.stderr
