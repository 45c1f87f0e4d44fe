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
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaForCausalLM
from typer.testing import CliRunner

from tests.fast.tiny_training import (
    started,
    tiny_cache,
    tiny_draft,
    tiny_target,
    trained,
)
from tests.heads import llama
from vllm_treespec.train import distill
from vllm_treespec.train.cli import app
from vllm_treespec.train.drafter import Drafter
from vllm_treespec.train.pipeline import save_drafter
from vllm_treespec.train.teacher import TeacherCache, TeacherOptions, cache_teacher
from vllm_treespec.train.text import Row

DRAFT, HEAD, BLOCK = "draft model", "head", "one-pass head"


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> TeacherCache:
    return tiny_cache(tmp_path_factory.mktemp("teacher"), tiny_target())


def fresh(kind: str, cache: TeacherCache) -> Drafter:
    """A drafter before the first of eight steps."""
    options: dict[str, Any] = {"max_steps": 8, "save_steps": 2, "seed": 3}
    if kind == DRAFT:
        return tiny_draft(tiny_target(), **options)
    name, sizes = ("dflash", {"markov_rank": 2}) if kind == BLOCK else ("medusa", {})
    head: Drafter = started(name, tiny_target(), cache, options, **sizes)
    return head


def train(kind: str, cache: TeacherCache, folder: Path) -> dict[str, Tensor]:
    """Train a drafter, from what is in the folder; return its weights."""
    drafter = fresh(kind, cache)
    trained(drafter, cache, folder)
    return drafter.model.state_dict()


def cut(path: Path) -> None:
    """Leave the first half of a file, as a kill while it is written does."""
    os.truncate(path, path.stat().st_size // 2)


def empty(path: Path) -> None:
    """Leave a file that was opened and not yet written."""
    os.truncate(path, 0)


def flip(path: Path) -> None:
    """Change one bit in the middle of a file, as a damaged disk does."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def not_a_number(path: Path) -> None:
    """Put NaN into a file of weights."""
    tensors = load_file(path)
    next(iter(tensors.values())).fill_(torch.nan)
    save_file(tensors, path, metadata={"format": "pt"})


def shards(path: Path) -> None:
    """Leave an index of two shards, one of them cut, in place of the weights."""
    tensors = load_file(path)
    files = {name: f"model-0000{n % 2}.safetensors" for n, name in enumerate(tensors)}
    for file in set(files.values()):
        part = {name: t for name, t in tensors.items() if files[name] == file}
        save_file(part, path.with_name(file), metadata={"format": "pt"})
    cut(path.with_name(file))
    index = path.with_name("model.safetensors.index.json")
    index.write_text(json.dumps({"weight_map": files}))
    path.unlink()


# What a kill, or a damaged disk, does to the newest checkpoint.
LEFT: dict[str, list[tuple[str, Callable[[Path], Any]]]] = {
    DRAFT: [
        ("model.safetensors", empty),
        ("model.safetensors", cut),
        ("model.safetensors", flip),
        ("model.safetensors", not_a_number),
        ("model.safetensors", shards),
        ("optimizer.pt", cut),
        ("optimizer.pt", flip),
        ("scheduler.pt", cut),
        ("rng_state.pth", cut),
        ("trainer_state.json", cut),
        ("trainer_state.json", empty),
        ("trainer_state.json", lambda path: path.write_text("{}")),
        ("trainer_state.json", Path.unlink),
        ("sums.json", cut),
        ("sums.json", Path.unlink),
    ],
    HEAD: [("optimizer.pt", cut), ("trainer_state.json", Path.unlink)],
    BLOCK: [("optimizer.pt", cut)],
}


@pytest.mark.thorough
@pytest.mark.parametrize("kind", LEFT)
def test_half_written_checkpoints_are_skipped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str, cache: TeacherCache
) -> None:
    """Red when a checkpoint that is half written or damaged stops or changes a run."""
    uncut = train(kind, cache, tmp_path)
    newest, before = tmp_path / "checkpoint-8", tmp_path / "checkpoint-6"
    for name, leave in LEFT[kind]:
        leave(newest / name)
        capsys.readouterr()
        resumed = train(kind, cache, tmp_path)
        said = [s for s in capsys.readouterr().out.splitlines() if "not whole" in s]
        assert len(said) == 1, (name, leave)
        says = f"{newest} is not whole ({name} is missing, or not as it was written)"
        assert says in said[0]
        assert said[0].endswith("goes on from checkpoint-6")
        for tensor, value in uncut.items():
            torch.testing.assert_close(resumed[tensor], value, rtol=0, atol=0)
    # Both checkpoints that are kept are broken: from the start.
    cut(newest / "optimizer.pt")
    for path in before.iterdir():
        path.unlink()
    capsys.readouterr()
    resumed = train(kind, cache, tmp_path)
    printed = capsys.readouterr().out
    assert "checkpoint-6 is not whole" in printed
    assert printed.count("training goes on from the start") == 2
    for tensor, value in uncut.items():
        torch.testing.assert_close(resumed[tensor], value, rtol=0, atol=0)


def test_diverged_weights_are_not_saved(tmp_path: Path, cache: TeacherCache) -> None:
    """Red when a checkpoint gets NaN weights, or a diverged run goes on."""
    drafter = fresh(HEAD, cache)
    loss = drafter.loss

    def diverging(inputs: Any, progress: float, generator: Any) -> Tensor:
        found = loss(inputs, progress, generator)
        return found * torch.nan if progress >= 3 / 8 else found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(drafter, "loss", diverging)
        with pytest.raises(ValueError, match=r"training diverged: .* at step 4, .*--l"):
            trained(drafter, cache, tmp_path)
    assert sorted(path.name for path in tmp_path.glob("checkpoint-*")) == [
        "checkpoint-2"
    ]


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
    with pytest.raises(ValueError, match=r"options\.json is not JSON .*: delete "):
        distill.check_same_run(tmp_path, {"lr": 1})


def test_weights_appear_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Red when a kill while the folder is written leaves weights cut short in it."""
    draft: Any = tiny_draft(tiny_target())
    save_drafter(draft, tmp_path, None)
    before = (tmp_path / "model.safetensors").read_bytes()

    def interrupted(folder: Path) -> None:
        (folder / "model.safetensors").write_bytes(b"half")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(draft.model, "save_pretrained", interrupted)
        with pytest.raises(KeyboardInterrupt):
            save_drafter(draft, tmp_path, None)
    assert (tmp_path / "model.safetensors").read_bytes() == before
    save_drafter(draft, tmp_path, None)
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


@pytest.mark.thorough
def test_killed_command_goes_on(tmp_path: Path) -> None:
    """Red when kill -9 while a checkpoint is written stops ``treespec train draft``."""
    tiny_target().save_pretrained(tmp_path / "target")
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


def test_shards_of_the_teacher_that_are_cut(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Red when a shard cut short is a traceback, or is read as it is."""
    target = LlamaForCausalLM(llama()).eval()
    rows = [Row(list(range(9)), 2), Row(list(range(7)), 3)]
    (shard,) = cache_teacher(target, "target", rows, tmp_path, TeacherOptions())
    whole = shard.read_bytes()
    cut(shard)
    capsys.readouterr()
    cache_teacher(target, "target", rows, tmp_path, TeacherOptions())
    assert f"{shard} is cut short" in capsys.readouterr().out
    assert shard.read_bytes() == whole
