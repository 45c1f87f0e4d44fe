"""``treespec doctor --target``: from a config to what would be refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import save_file
from transformers import BertConfig
from typer.testing import CliRunner

from vllm_treespec.cli import app
from vllm_treespec.tools import target_doctor

pytest.importorskip("vllm", reason="it reads models with vLLM")

from vllm.engine.arg_utils import EngineArgs

from tests.fast.small_engine import model_config

pytestmark = pytest.mark.usefixtures("parsed")


@pytest.fixture
def target(tmp_path: Path) -> Path:
    """Folder of a target's configuration, without weights."""
    model_config().save_pretrained(tmp_path)
    return tmp_path


def doctor(*options: object) -> tuple[int, str]:
    """The exit code of ``treespec doctor``, and what it prints, on one line."""
    wide = {"COLUMNS": "200"}
    done = CliRunner().invoke(app, ["doctor", *map(str, options)], env=wide)
    return done.exit_code, " ".join(done.output.split())


def change(target: Path, **keys: Any) -> None:
    """Change keys of the configuration."""
    file = target / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **keys}))


def write_draft(folder: Path) -> Path:
    """Write a draft model's configuration, and a file of no weights; the folder."""
    model_config().save_pretrained(folder)
    save_file({}, folder / "model.safetensors")
    return folder


def test_a_target_that_works(target: Path) -> None:
    """Red when a supported model is refused, or its weights are asked for."""
    code, text = doctor("--target", target)
    assert code == 0, text
    assert text.endswith(f"{target} on cpu draft trees work here")
    assert "multi-head latent attention │ no" in doctor("--target", target, "-v")[1]


def test_what_is_in_the_way_is_named(target: Path) -> None:
    """Red when a model that would be refused at the start is not refused here."""
    change(target, model_type="mamba", architectures=["MambaForCausalLM"])
    code, text = doctor("--target", target, "--verbose")
    assert code == 1
    assert "a hybrid or state-space model │ yes: refused" in text
    assert text.count("yes: refused") == 1
    assert "a hybrid or state-space model yet" in text
    assert "serve it without speculative_config" in text
    assert "draft trees do not work here" in text


@pytest.mark.parametrize(("device", "refused"), [("cpu", False), ("cuda", True)])
def test_chunks_are_read_on_a_cpu_only(
    device: str, refused: bool, target: Path, tmp_path: Path
) -> None:
    """Red when the check says another thing than the engine's start on this device.

    Of a target with chunks of attention, or of a draft model that no kernel reads.
    """
    draft = write_draft(tmp_path / "draft")
    for model in (target, draft):
        change(model, attention_chunk_size=64)
    spec = json.dumps({"method": "sd", "model": str(draft), "depth": 2})
    check = ("--target", target, "--speculative-config", spec, "--device", device)
    code, text = doctor(*check)
    assert code == refused
    assert ("do not support chunked local attention (on a GPU)" in text) == refused
    assert ("has chunks of 64 tokens); name another draft model" in text) == refused


def test_a_spec_config_is_checked_too(target: Path) -> None:
    """Red when a good spec-config is refused (wrong ones: test_command_messages)."""
    spec = {"method": "suffix_tree", "num_drafts": 8}
    assert doctor("--target", target, "--speculative-config", json.dumps(spec))[0] == 0


def test_lengths_are_those_of_the_engine(target: Path, tmp_path: Path) -> None:
    """Red when a draft model is refused that ``--max-model-len`` makes fit."""
    draft = write_draft(tmp_path / "draft")
    change(draft, max_position_embeddings=32)
    spec = json.dumps({"method": "sd", "model": str(draft), "depth": 2})
    check = ("--target", target, "--speculative-config", spec)
    code, text = doctor(*check)
    assert code == 1
    assert "pass --max-model-len 32 or less" in text
    assert doctor(*check, "--max-model-len", 32)[0] == 0
    code, text = doctor(*check, "--max-model-len", 32, "--tensor-parallel-size", 3)
    assert code == 1
    assert "tensor_parallel_size=3 does not divide" in text


def test_all_that_is_in_the_way_is_named(target: Path, tmp_path: Path) -> None:
    """Red when one fault hides the others: of the target, of a draft, of an option."""
    draft = tmp_path / "draft"
    model_config().save_pretrained(draft)
    change(draft, vocab_size=64, max_position_embeddings=32)
    spec = json.dumps({"method": "sd", "model": str(draft)})
    change(target, model_type="mamba", architectures=["MambaForCausalLM"])
    check = ("--target", target, "--speculative-config", spec)
    code, text = doctor(*check, "--tensor-parallel-size", 3)
    assert code == 1
    for says in (
        "a hybrid or state-space model yet",
        "draft holds no *.safetensors weights; convert",
        "has 64 tokens, the target's 32",
        "tensor_parallel_size=3 does not divide",
    ):
        assert text.count(says) == 1, (says, text)


def test_too_long_texts_are_named(target: Path) -> None:
    """Red when vLLM's reason is lost in its own advice, or hides other faults."""
    spec = json.dumps({"method": "suffix_tree", "width": 2})
    check = ("--target", target, "--speculative-config", spec)
    code, text = doctor(*check, "--max-model-len", 1000)
    assert code == 1
    assert "--max-model-len: User-specified max_model_len (1000) is greater" in text
    assert "pass less, or leave it out" in text
    assert "VLLM_ALLOW_LONG_MAX_MODEL_LEN" not in text.split("refused: ", 1)[1]
    assert "'width' is not a key of this method" in text


def test_pooling_models_are_refused(tmp_path: Path) -> None:
    """Red when a model that writes no text is a traceback, or passes."""
    BertConfig(
        architectures=["BertModel"],
        hidden_size=64,
        num_attention_heads=4,
        num_hidden_layers=1,
        max_position_embeddings=64,
    ).save_pretrained(tmp_path)
    spec = json.dumps({"method": "suffix_tree"})
    code, text = doctor("--target", tmp_path, "--speculative-config", spec)
    assert code == 1
    assert "do not support a pooling model yet" in text


def test_models_whose_code_lacks_a_package(
    target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Red when a model with images is refused without naming what is to be installed.

    vLLM imports a model's code in a process of its own, and says no more than this.
    """

    def fail(arguments: object) -> None:
        raise ValueError("Model architectures ['X'] failed to be inspected. See logs.")

    monkeypatch.setattr(EngineArgs, "create_model_config", fail)
    for there, says in ((False, "install torchvision, which"), (True, "its log says")):
        monkeypatch.setattr(
            target_doctor, "is_torchvision_available", lambda there=there: there
        )
        code, text = doctor("--target", target)
        assert code == 1
        assert f"vLLM cannot import the code of {target}" in text
        assert says in text


def test_another_device_needs_no_such_machine(target: Path) -> None:
    """Red when a laptop cannot say what a server with a GPU would refuse."""
    code, text = doctor("--target", target, "--device", "cuda")
    assert code == 0, text
    assert f"{target} on cuda" in text
    code, text = doctor("--device", "cuda")
    assert code == 0, text
    assert " on cuda; supported" in text
    assert len(text) < 300


def test_slow_arithmetic_is_told(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Red when doctor does not say that a processor lacks the target's arithmetic."""
    monkeypatch.setattr(target_doctor, "slow_arithmetic", lambda dtype: "no arithmetic")
    code, text = doctor("--target", target)
    assert code == 0, text
    assert "slow: no arithmetic" in text
