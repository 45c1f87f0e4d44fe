"""Commands that are refused: one message names option or file, and remedy."""

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import save_file
from transformers import PretrainedConfig
from typer.testing import CliRunner

from tests.fast.tables import assert_says, rows, written_out
from tests.heads import DRAFT_CONFIG, write_draft, write_head
from tests.tiers import grid
from vllm_treespec import __version__
from vllm_treespec.cli import app
from vllm_treespec.config import METHODS
from vllm_treespec.tools import sides
from vllm_treespec.tools.batch import engine

SUFFIX = {"method": "suffix_tree"}
DEEP = '{"a": ' + "[" * 9999 + "]" * 9999 + "}"
# What every call of a command has; an option given twice counts as given last.
SHARED = {
    "plan": "IN/target --gpu-memory 80GiB --speculative-config SUFFIX",
    "tune": "--out IN/new",
    "batch": "--model m",
    "doctor": "--target IN/target",
    "train": "--target IN/target --out TMP",
}
CALLS = rows("""
assets --dir IN/file/models => IN/file/models cannot be made
assets --dir IN/file/models => --dir
plan --tensor-parallel-size 3 => --tensor-parallel-size 3
plan --gpu-memory much => --gpu-memory 'much' is no size; write one such as 80GiB
plan --gpu-memory 80 => --gpu-memory '80' is no size
plan --allowance x => --allowance 'x' is no size
plan --block-size 20 => --block-size 20
plan --max-model-len 999999 => IN/target reads at most 128 positions; pass so many, or
plan --max-num-seqs 8 --max-num-batched-tokens 4 => --max-num-batched-tokens 4 is less
    than --max-num-seqs 8
plan --allowance 90GiB => Pass a smaller --allowance
doctor --tensor-parallel-size 3 => --tensor-parallel-size 3 does not divide
tune IN/target --draft IN/eagle => IN/eagle holds an eagle head, not a draft model
here batch IN/in.jsonl OUT --model IN/none => --model: there is no folder IN/none;
    name the folder
batch IN/in.jsonl OUT --speculative-config IN/none.json => there is no file IN/none.json
plan --speculative-config '{"method": "rsd-s"}' => did you mean 'rsd_s'
doctor --speculative-config '{"method": "suffix_tree", "width": 2}' => 'width' is not a
    key of this method
doctor --speculative-config '{"method": "ngrams"}' => 'method' is 'ngrams'
here doctor --speculative-config 2 => need --target
here doctor --max-model-len 2 => need --target
here doctor --tensor-parallel-size 2 => need --target
doctor --speculative-config { => the spec-config is not JSON
tune IN/none => TARGET: there is no folder IN/none; name the folder
tune IN/empty => TARGET: IN/empty holds no config.json; name the folder
tune none/none => TARGET: there is no folder none/none, and the hub gave no
tune IN/target --draft IN/none => --draft: there is no folder IN/none
tune IN/target --draft ./none => --draft: there is no folder ./none
tune IN/target --head IN/none => there is no folder IN/none; name the
tune IN/target --temperatures warm => --temperatures: 'warm' is no list of numbers
batch --dtype float32 IN/in.jsonl OUT => write INPUT and OUTPUT first
batch IN/in.jsonl --dtype float32 OUT => write INPUT and OUTPUT first
batch IN/in.jsonl OUT third.jsonl => 'third.jsonl' belongs to no option
batch missing.jsonl OUT => missing.jsonl: there is no such file
batch IN/in.jsonl IN/in.jsonl => INPUT and OUTPUT are one file
batch IN/in.jsonl OUT --sampling-params { => --sampling-params is not JSON
batch IN/in.jsonl OUT --sampling-params DEEP => are nested too deeply
batch IN/in.jsonl OUT --speculative-config [1] => is no JSON object
batch IN/in.jsonl OUT --speculative-config '{"method": "sd"}' => 'model' is missing; add
    it
train draft --text absent.jsonl => absent.jsonl
train draft --text IN/text.jsonl => IN/text.jsonl:1: token_ids[1] is 97, the target's
    tokens are 0 to 31
train redrafter --text absent => absent
train medusa --inner-size 8 => inner-size
here train evaluate h --target t --text absent --work w => absent
train eagle --text absent => absent does not exist
train eagle --version 2 => pass --version 1
train eagle --version 1 --layers three => leave out --layers three
train eagle --version 1 --norm-layers => --norm-layers is for EAGLE-3
train eagle --feature-weight 1 => pass --layers one
train eagle --layers two => --layers
train eagle --text-share 2 => --text-share
""")


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of what the calls name."""
    folder = tmp_path_factory.mktemp("inputs")
    write_draft(folder / "target")
    write_head(folder / "eagle", "eagle")
    (folder / "empty").mkdir()
    (folder / "file").touch()
    (folder / "in.jsonl").write_text('{"prompt": "a"}\n')
    (folder / "text.jsonl").write_text('{"token_ids": [1, 97], "prompt_len": 1}\n')
    return folder


def no_hub(model: str, **options: Any) -> None:
    """The hub has no such model."""
    raise OSError(f"{model} is not a model identifier")


def call(arguments: list[str]) -> tuple[int, str]:
    """Exit status of a command and what it prints, on one line."""
    done = CliRunner().invoke(app, arguments, env={"COLUMNS": "9999"})
    assert isinstance(done.exception, SystemExit), done.exception
    return done.exit_code, " ".join(done.output.split())


@pytest.mark.parametrize(("given", "says"), CALLS)
def test_wrong_calls(
    given: str,
    says: str,
    inputs: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Red when a wrong call starts its work, leaves files, or does not say why."""
    if " none/" in given:
        monkeypatch.setattr(PretrainedConfig, "get_config_dict", no_hub)
    monkeypatch.setattr(sides, "side_events", None)
    monkeypatch.setattr(engine, "VllmAnswerer", None)
    before = sorted(inputs.rglob("*"))
    command, *arguments = shlex.split(given)
    shared = SHARED.get(command, "").split()
    first = arguments[:1] if command == "train" else []
    found = [command, *first, *shared, *arguments[len(first) :]]
    if command == "batch":
        found = [command, *arguments, *shared]
    if command == "here":
        found = arguments
    places = {"SUFFIX": json.dumps(SUFFIX), "DEEP": DEEP, "OUT": "IN/out.jsonl"}
    code, printed = call(
        written_out(found, {**places, "TMP": str(tmp_path), "IN": str(inputs)})
    )
    assert code in (1, 2)
    assert says.replace("IN/", f"{inputs}/") in printed
    assert sorted(inputs.rglob("*")) == before


def test_commands_say_what_they_are() -> None:
    """Red when a method is left out of the list, or an option is missing."""
    done = CliRunner().invoke(app, ["methods"])
    assert done.exit_code == 0
    lines = done.stdout.splitlines()
    assert [line.split()[0] for line in lines] == list(METHODS)
    assert all(" Needs " in line for line in lines)
    assert CliRunner().invoke(app, ["--version"]).stdout == f"treespec {__version__}\n"
    for command in ("", "expand", "train", "train draft", "batch", "soak", "tune"):
        done = CliRunner().invoke(app, [*command.split(), "-h"])
        assert done.exit_code == 0
        assert "Usage: " in done.stdout


# A spec-config; the words where it is given as text, and where a file holds it.
SPECS: list[tuple[str | bytes, str | None, str | None]] = [
    ("{", "is not JSON", "is not JSON"),
    ("[]", "is no JSON object; write one such as", "holds no JSON object"),
    ('{"a": NaN}', "NaN is no number of JSON's", "NaN is no number of JSON's"),
    ('{"max_trees": Infinity}', "Infinity is no number", "Infinity is no number of J"),
    (DEEP, "nested too deeply", "nested too deeply"),
    ('{"method": "ngram"}', "a method of vLLM's own", None),
    ("nowhere.json", "there is no file nowhere.json; name a JSON file", None),
    ("x" * 4000, "xx...xx", None),
    ('{"method": "sd"}'.encode("utf-16"), None, "is not UTF-8 text"),
]
READERS = [
    ["expand"],
    ["soak", "--spec"],
    ["plan", "TARGET", "--gpu-memory", "8GiB", "--speculative-config"],
]


@pytest.mark.parametrize(("given", "as_text", "in_file"), SPECS)
@pytest.mark.parametrize("command", READERS, ids=str)
def test_spec_configs(
    command: list[str],
    given: str | bytes,
    as_text: str | None,
    in_file: str | None,
    tmp_path: Path,
) -> None:
    """Red when a command takes files alone, or what cannot be read is a traceback."""
    file = tmp_path / "spec.json"
    if as_text:
        done = CliRunner().invoke(app, [*command, str(given)])
        assert_says(done.stderr.strip(), as_text, 500)
    if in_file:
        file.write_bytes(given if isinstance(given, bytes) else given.encode())
        done = CliRunner().invoke(app, [*command, str(file)])
        assert_says(done.stderr.strip(), in_file)
        assert str(file) in done.stderr
    assert done.exit_code == 1


def test_a_soak_needs_a_target(tmp_path: Path) -> None:
    """Red when a soak without a model ends in transformers' words."""
    command = ["soak", "--target", "/nowhere", "--out", str(tmp_path)]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 1
    assert "--target: there is no folder /nowhere" in done.stderr


@pytest.fixture
def draft(tmp_path: Path) -> Path:
    """Folder of a draft model."""
    return write_draft(tmp_path / "draft")


NAMES = {
    "/nowhere/model": "there is no folder /nowhere/model",
    "./model": "there is no folder ./model",
    "~/model": "there is no folder ~/model (only a shell replaces ~",
    "my model": "there is no folder my model, and it is no hub id either",
    "models/llama/8b": "there is no folder models/llama/8b, and it is no hub id",
    "/" + "x" * 4000: "there is no folder /xx",
    "x" * 4000: "there is no folder xx",
}
COMMANDS = ["expand", "plan", "doctor"]


@pytest.mark.parametrize(
    ("command", "role", "name"),
    grid(
        COMMANDS,
        ["target", "sd", "eagle_tree"],
        NAMES,
        quick=lambda command, role, name: (
            (command, role) == ("expand", "sd") or name in ("./model", "x" * 4000)
        ),
    ),
)
def test_wrong_names_of_models(command: str, role: str, name: str, draft: Path) -> None:
    """Red when a wrong name is a traceback, or the hub's words about its own ids."""
    assert NAMES[name] in refused(command, role, name, draft)


FOLDERS: list[tuple[Any, str]] = [
    (None, "holds no config.json; name the folder"),
    ({"num_attention_heads": 0}, "config.json says num_attention_heads 0; correct"),
    ({"num_key_value_heads": -1}, "config.json says num_key_value_heads -1"),
    ({"model_type": "odd"}, "has model type `odd` but Transformers does not"),
    ("{", "config.json is not JSON ("),
    (DEEP, "nested too deeply"),
]


@pytest.mark.parametrize(
    ("command", "role", "folder"),
    grid(
        COMMANDS,
        ["target", "sd"],
        FOLDERS,
        quick=lambda command, role, folder: (
            (command, role) == ("expand", "sd") or folder in FOLDERS[2:5:2]
        ),
    ),
)
def test_odd_folders_of_models(
    command: str, role: str, folder: tuple[Any, str], draft: Path, tmp_path: Path
) -> None:
    """Red when a folder is a traceback, or the advice breaks vLLM's own versions."""
    odd, (content, says) = tmp_path / "odd", folder
    odd.mkdir()
    if content is not None:
        text = (
            json.dumps(DRAFT_CONFIG | content) if isinstance(content, dict) else content
        )
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
    text = json.dumps(SUFFIX if role == "target" else spec)
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
