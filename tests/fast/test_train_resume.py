"""Training that was killed goes on, whatever the kill left half written."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM
from typer.testing import CliRunner

from vllm_treespec.train import distill
from vllm_treespec.train.cli import app
from vllm_treespec.train.distill import DistillOptions, DistillTrainer, run_training
from vllm_treespec.train.model import save_draft

STEPS = 8
OPTIONS = DistillOptions(epochs=1, save_steps=2, seed=3)

DRAFT, HEAD = "draft model", "head"


class Numbers(Dataset):
    """One batch of random numbers a step."""

    def __len__(self) -> int:
        return STEPS

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(number)
        return {"input_ids": torch.randint(11, (2, 5), generator=generator)}


class TinyTrainer(DistillTrainer):
    """Trainer of a model whose loss is a mean of logits."""

    def compute_loss(self, model: Any, inputs: Any, *others: Any, **more: Any) -> Any:
        """Return the loss of a draft model or of a head."""
        head = model["head"] if isinstance(model, nn.ModuleDict) else model
        return head(inputs["input_ids"]).logits.logsumexp(-1).mean()

    def quality(self, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Nothing worth measuring."""
        return {"kl": torch.zeros(1)}


def train(kind: str, folder: Path) -> dict[str, torch.Tensor]:
    """Train a tiny model as draft models or as heads are; return its weights."""
    torch.manual_seed(5)
    config = LlamaConfig(
        vocab_size=11,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=1,
        tie_word_embeddings=kind == DRAFT,
    )
    llama = LlamaForCausalLM(config)
    model = llama if kind == DRAFT else nn.ModuleDict({"head": llama})
    run_training(TinyTrainer, model, (Numbers(), Numbers()), folder, OPTIONS, {})
    return llama.state_dict()


def cut(path: Path) -> None:
    """Leave the first half of a file, as a kill while it is written does."""
    os.truncate(path, path.stat().st_size // 2)


def empty(path: Path) -> None:
    """Leave a file that was opened and not yet written."""
    os.truncate(path, 0)


# What a kill does to the newest checkpoint.
LEFT: dict[str, list[tuple[str, Callable[[Path], None]]]] = {
    DRAFT: [
        ("model.safetensors", empty),
        ("model.safetensors", cut),
        ("optimizer.pt", cut),
        ("scheduler.pt", cut),
        ("rng_state.pth", cut),
        ("trainer_state.json", cut),
        ("trainer_state.json", Path.unlink),
    ],
    HEAD: [("optimizer.pt", cut), ("trainer_state.json", Path.unlink)],
}


@pytest.mark.parametrize("kind", LEFT)
def test_half_written_checkpoints_are_skipped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    """Red when a checkpoint that a kill left half written stops or changes a run."""
    uncut = train(kind, tmp_path)
    newest, before = tmp_path / "checkpoint-8", tmp_path / "checkpoint-6"
    for name, leave in LEFT[kind]:
        leave(newest / name)
        capsys.readouterr()
        resumed = train(kind, tmp_path)
        said = [s for s in capsys.readouterr().out.splitlines() if "incomplete" in s]
        assert len(said) == 1, (name, leave)
        assert f"{newest} is incomplete ({name} is missing or cut short)" in said[0]
        assert said[0].endswith("goes on from checkpoint-6")
        for tensor, value in uncut.items():
            torch.testing.assert_close(resumed[tensor], value, rtol=0, atol=0)
    # Both checkpoints that are kept are broken: from the start.
    cut(newest / "optimizer.pt")
    for path in before.iterdir():
        path.unlink()
    capsys.readouterr()
    resumed = train(kind, tmp_path)
    printed = capsys.readouterr().out
    assert "checkpoint-6 is incomplete" in printed
    assert printed.count("training goes on from the start") == 2
    for tensor, value in uncut.items():
        torch.testing.assert_close(resumed[tensor], value, rtol=0, atol=0)


def test_options_appear_whole(tmp_path: Path) -> None:
    """Red when a kill can leave half of options.json, or its error is unclear."""

    def interrupted(self: Path, text: str) -> None:
        with self.open("w") as file:
            file.write(text[: len(text) // 2])
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "write_text", interrupted)
        with pytest.raises(KeyboardInterrupt):
            distill.check_same_run(tmp_path, {"lr": 1})
    distill.check_same_run(tmp_path, {"lr": 1})
    with pytest.raises(ValueError, match="other lr"):
        distill.check_same_run(tmp_path, {"lr": 2})
    cut(tmp_path / "options.json")
    with pytest.raises(ValueError, match=r"options\.json is cut short: delete .*--out"):
        distill.check_same_run(tmp_path, {"lr": 1})


def test_weights_appear_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Red when a kill while the folder is written leaves weights cut short in it."""
    draft = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=11,
            hidden_size=8,
            intermediate_size=8,
            num_hidden_layers=1,
            num_attention_heads=1,
        )
    )
    save_draft(draft, tmp_path, None)
    before = (tmp_path / "model.safetensors").read_bytes()

    def interrupted(folder: Path) -> None:
        (folder / "model.safetensors").write_bytes(b"half")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(draft, "save_pretrained", interrupted)
        with pytest.raises(KeyboardInterrupt):
            save_draft(draft, tmp_path, None)
    assert (tmp_path / "model.safetensors").read_bytes() == before
    save_draft(draft, tmp_path, None)
    assert not (tmp_path / "partial").exists()


KILLED = """
import os, signal
from transformers import Trainer
from vllm_treespec.train.cli import app

write = Trainer._save_rng_state

def killed(self, output_dir):
    if self.state.global_step == 4:
        os.kill(os.getpid(), signal.SIGKILL)
    write(self, output_dir)

Trainer._save_rng_state = killed
app()
"""


def test_killed_command_goes_on(tmp_path: Path) -> None:
    """Red when kill -9 while a checkpoint is written stops ``treespec train draft``."""
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=97,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=4,
        max_position_embeddings=64,
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path / "target")
    rows = [{"token_ids": [n, *range(20)], "prompt_len": 3} for n in range(20)]
    (tmp_path / "t.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    command = [
        *("draft", "--target", str(tmp_path / "target"), "--out", str(tmp_path / "o")),
        *("--text", str(tmp_path / "t.jsonl"), "--save-steps", "2", "--epochs", "2"),
        *("--hidden-size", "16", "--layers", "1", "--heads", "2", "--head-dim", "8"),
        *("--intermediate-size", "24", "--batch-tokens", "64"),
    ]

    killed = subprocess.run(
        [sys.executable, "-c", KILLED, *command],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert killed.returncode == -signal.SIGKILL, killed.stderr[-2000:]
    left = tmp_path / "o" / "work" / "draft" / "checkpoint-4"
    assert left.is_dir()
    assert not (left / "trainer_state.json").exists()
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.output[-2000:]
    assert "training goes on from checkpoint-2" in done.output
    assert (tmp_path / "o" / "model.safetensors").is_file()
