"""`treespec shrink`: a draft model in int8, with a list of hot tokens."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast
from typer.testing import CliRunner

from tests.heads import llama, write_head
from tests.published_heads import PublishedHead
from vllm_treespec.cli import app
from vllm_treespec.heads.checkpoint import WEIGHTS
from vllm_treespec.tools.shrink import texts_of

WORDS = ["<end>", "one", "two", "three"]
ROWS = [
    {"messages": [{"content": "one two two"}], "score": 1},
    {"answer": "two three three three", "tags": ["two"]},
]


@pytest.fixture(scope="module")
def draft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with a tokenizer of a few words."""
    folder = tmp_path_factory.mktemp("draft")
    config = llama(vocab_size=len(WORDS), hidden_size=32, intermediate_size=48)
    config.eos_token_id, config.tie_word_embeddings = 0, True
    torch.manual_seed(0)
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    vocabulary = {word: number for number, word in enumerate(WORDS)}
    words = Tokenizer(WordLevel(vocabulary, unk_token="<end>"))
    words.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(folder)
    return folder


def shrink(*arguments: Any) -> Any:
    """Run the command."""
    return CliRunner().invoke(app, ["shrink", *map(str, arguments)])


def text_file(folder: Path) -> Path:
    """Some rows of JSON."""
    file = folder / "text.jsonl"
    file.write_text("".join(f"{json.dumps(row)}\n" for row in ROWS))
    return file


def test_weights_are_int8_and_close(draft: Path, tmp_path: Path) -> None:
    """Red when a weight is off by more than rounding, or a layer is left out."""
    done = shrink(draft, tmp_path / "out")
    assert done.exit_code == 0, done.stderr
    assert "likeliest token unchanged" in done.stdout
    before = load_file(draft / "model.safetensors")
    after = load_file(tmp_path / "out" / "model.safetensors")
    linear = [name for name in before if name.endswith("proj.weight")]
    assert len(linear) == 7 * sum("q_proj.weight" in name for name in before) > 0
    for name in linear:
        scale = after[f"{name}_scale"].float()
        error = (after[name].float() * scale - before[name].float()).abs()
        assert after[name].dtype == torch.int8
        # half a step, and the scale's own rounding to bfloat16
        assert bool((error <= scale * (0.5 + 127 / 256)).all())
    others = before.keys() - set(linear)
    assert all(after[name].equal(before[name]) for name in others)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    form = config["quantization_config"]
    assert (form["quant_method"], form["ignore"]) == ("compressed-tensors", ["lm_head"])
    assert not (tmp_path / "out" / "hot_tokens.json").exists()


def test_hot_tokens_are_the_commonest_of_the_text(draft: Path, tmp_path: Path) -> None:
    """Red when keys of the rows are counted, or no draft can end an answer."""
    done = shrink(
        draft, tmp_path / "out", "--text", text_file(tmp_path), "--hot-tokens", 2
    )
    assert done.exit_code == 0, done.stderr
    hot = json.loads((tmp_path / "out" / "hot_tokens.json").read_text())
    assert [WORDS[token] for token in hot] == ["<end>", "two", "three"]


def test_texts(tmp_path: Path) -> None:
    """Red when a text within a row is missed, or plain text is read as JSON."""
    found = ["one two two", "two three three three", "two"]
    assert list(texts_of(text_file(tmp_path))) == found
    plain = tmp_path / "plain.txt"
    plain.write_text("a text\n")
    assert list(texts_of(plain)) == ["a text"]


def change(folder: Path, edit: Any) -> None:
    """Write the weights again, edited."""
    tensors = load_file(folder / WEIGHTS)
    edit(tensors)
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})


def test_failures_leave_no_folder(
    draft: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Red when a full disk leaves half of a draft model, or its folder."""

    def full(*arguments: Any) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(PreTrainedTokenizerFast, "save_pretrained", full)
    done = shrink(draft, tmp_path / "out")
    assert "treespec: No space left on device" in done.stderr
    assert not (tmp_path / "out").exists()


def test_refusals(draft: Path, tmp_path: Path) -> None:
    """Red when a folder is overwritten, or a message names no remedy."""
    out, numbers = tmp_path / "out", tmp_path / "numbers.jsonl"
    numbers.write_text('{"token_ids": [1, 2]}\n')
    eagle, redrafter = PublishedHead("eagle").write(tmp_path / "eagle"), tmp_path / "rd"
    write_head(redrafter, "redrafter")
    cut, no_number, lacking, nested = (
        shutil.copytree(draft, tmp_path / name) for name in ("cut", "nan", "lost", "[[")
    )
    os.truncate(cut / WEIGHTS, 999)
    change(no_number, lambda t: t["model.norm.weight"].fill_(torch.nan))
    change(lacking, lambda t: t.pop("model.layers.1.mlp.up_proj.weight"))
    (nested / "config.json").write_text("[" * 100_000)
    assert shrink(draft, out).exit_code == 0
    for arguments, says in (
        ((draft, out), "is not empty; name a new folder"),
        ((out, tmp_path / "again"), "is quantised already; name the model it was"),
        ((tmp_path / "none", tmp_path / "new"), "there is no folder"),
        (
            (eagle, tmp_path / "new"),
            "holds an eagle head, and shrink is for draft",
        ),
        ((eagle, tmp_path / "new"), "as it is, with method 'eagle_tree'"),
        ((redrafter, tmp_path / "new"), "holds a redrafter head, and shrink is for"),
        ((cut, tmp_path / "new"), "is cut short or is no safetensors file"),
        ((no_number, tmp_path / "new"), "model.norm.weight of"),
        ((lacking, tmp_path / "new"), "lacks the weights model.layers.1.mlp.up_proj."),
        ((nested, tmp_path / "new"), "are nested too deeply); copy or save the draft"),
        ((draft, tmp_path / "new", "--tokenizer", tmp_path), "--tokenizer"),
        ((draft, tmp_path / "new", "--text", tmp_path / "none.txt"), "no file with"),
        ((draft, tmp_path / "new", "--text", numbers), "has no texts"),
    ):
        done = shrink(*arguments)
        assert done.exit_code == 1
        assert says in " ".join(done.stderr.split())
        assert not (tmp_path / "new").exists()
