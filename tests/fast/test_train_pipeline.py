"""Every kind of drafter: text, training, a cut, the rest, a folder that is used."""

import json
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Trainer,
)
from typer.testing import CliRunner, Result

from tests.fast.tiny_training import (
    HIDDEN,
    LAYERS,
    TARGET_SIZES,
    VOCAB,
    some_rows,
    tiny_target,
)
from tests.tiers import cases
from vllm_treespec.cli import app
from vllm_treespec.config import HEAD_METHODS, parse_spec_config
from vllm_treespec.config.checks import (
    check_head,
    check_head_files,
    check_hot_tokens,
    check_weights,
)
from vllm_treespec.heads import (
    load_dflash_head,
    load_eagle_head,
    load_head,
    load_lyanna_head,
)
from vllm_treespec.sources.base import FINAL_LAYER
from vllm_treespec.train import pipeline
from vllm_treespec.train.kinds import KINDS
from vllm_treespec.train.options import OPTIONS

SAVED, CUT_AT, HOT = 3, 5, 60
PAIRS = "--max-steps 8 --batch-tokens 64 --depth 3"
GIVEN = {
    "draft": "--hidden-size 16 --layers 1 --heads 2 --head-dim 8 --epochs 6"
    " --intermediate-size 24 --batch-tokens 64 --core-rows 30 --lr 0.01",
    "redrafter": "--depth 3 --blocks 1 --batch-positions 64 --epochs 6",
    "medusa": "--depth 3 --blocks 1 --batch-positions 64 --epochs 6 --lr 0.01",
    "eagle": PAIRS,
    "lyanna": f"{PAIRS} --no-context --token-info all --token-info-rank 8",
    "dflash": "--max-steps 16 --batch-tokens 64 --block-size 3 --anchor-share 0.5"
    " --lr 0.03",
}
NOISY = "--layers one --feature-noise 0.1 --feature-weight 1"


def make_target(family: str) -> PreTrainedModel:
    """A random target of a family, whose distributions are not flat."""
    if family == "llama":
        return tiny_target()
    torch.manual_seed(1)
    sizes = {"vocab_size": VOCAB, "hidden_size": HIDDEN, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 4, "max_position_embeddings": 64}
    if family == "opt":
        config = OPTConfig(
            **sizes, ffn_dim=48, word_embed_proj_dim=HIDDEN, init_std=0.3
        )
        return OPTForCausalLM(config).eval()
    return Qwen2ForCausalLM(Qwen2Config(**{**TARGET_SIZES, **sizes})).eval()


class Commands:
    """Runs ``treespec train`` for one target and its text."""

    def __init__(self, folder: Path, target: PreTrainedModel) -> None:
        """Write both."""
        self.folder, self.target = folder, target
        target.save_pretrained(folder / "target")
        # Other prompt lengths make the same text other questions.
        rows = [
            {"token_ids": row.token_ids, "prompt_len": length}
            for length in (1, 2, 3)
            for row in some_rows(1)
            if length <= row.prompt_len
        ]
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / "text.jsonl").write_text(text)
        self.steps = 0

    def run(self, command: str, *options: str) -> Result:
        """Run one, counting the steps of training."""
        paths = ["--target", f"{self.folder}/target"]
        paths += ["--text", f"{self.folder}/text.jsonl"]
        take_step = Trainer.training_step
        self.steps = 0

        def counted(trainer: Trainer, *arguments: Any, **more: Any) -> Any:
            self.steps += 1
            return take_step(trainer, *arguments, **more)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Trainer, "training_step", counted)
            words = command.split()
            return CliRunner().invoke(
                app, ["train", *words, *paths, *options, "--top-k", "16"]
            )

    def train(self, kind: str, name: str, options: str = "") -> Result:
        """Train into a folder of that name."""
        given = f"{GIVEN[kind]} --hot-tokens {HOT} --save-steps {SAVED} {options}"
        return self.run(kind, "--out", str(self.folder / name), *given.split())


def check_draft(folder: Path) -> None:
    """A draft model is what transformers and vLLM read."""
    draft = AutoModelForCausalLM.from_pretrained(folder)
    assert draft.dtype == torch.bfloat16
    assert draft(torch.tensor([[1, 2, 3]])).logits.shape == (1, 3, VOCAB)
    config = json.loads((folder / "config.json").read_text())
    assert (config["architectures"], config["head_dim"]) == (["LlamaForCausalLM"], 8)
    assert (config["tie_word_embeddings"], config["max_position_embeddings"]) == (
        True,
        64,
    )
    assert config["rope_parameters"]["rope_theta"] == 5000.0
    hot = json.loads((folder / "hot_tokens.json").read_text())
    assert hot == sorted(set(hot))
    assert len(hot) == HOT


def check_plain_head(folder: Path) -> None:
    """A head of one hidden state shares what the target has."""
    head = load_head(folder)
    assert head.hot_token_ids is not None
    assert head.hot_token_ids.diff().min() > 0
    assert not {"embedding.weight", "output.weight"} & head.state_dict().keys()


def check_medusa(folder: Path) -> None:
    """Its ranks' accuracies make its tree."""
    check_plain_head(folder)
    config = json.loads((folder / "config.json").read_text())
    assert len(config["rank_accuracies"]) == 3


def check_eagle(folder: Path) -> None:
    """An EAGLE head reads three layers."""
    head = load_eagle_head(folder)
    record = json.loads((folder / "training.json").read_text())
    assert head.config.target_layers in ((2, 3, 4), (FINAL_LAYER,))
    assert record["teacher"]["layers"] == list(head.config.layers)
    assert [len(level) for level in head.config.rank_accuracies] == [10, 10, 10]
    assert "embedding.weight" not in head.state_dict()


def check_lyanna(folder: Path) -> None:
    """A Lyanna head is of the variant that was asked for."""
    config = load_lyanna_head(folder).config
    assert (config.hidden_size, config.vocab_size) == (HIDDEN, VOCAB)
    assert [len(level) for level in config.rank_accuracies] == [10, 10, 10]
    record = json.loads((folder / "training.json").read_text())
    assert record["training"]["steps"] == 3
    assert record["teacher"]["layers"] == [FINAL_LAYER]
    variant: dict[str, Any] = {"first_token": True, "context": False}
    variant |= {"token_info_rank": 8, "token_info": "all"}
    assert record["head"] == variant
    assert {key: getattr(config, key) for key in variant} == variant


def check_dflash(folder: Path) -> None:
    """A one-pass head is what DSpark's readers read."""
    head = load_dflash_head(folder, LAYERS)
    config, record = head.config, json.loads((folder / "training.json").read_text())
    assert record["teacher"]["layers"] == list(config.layers) == [2, 3, 4]
    assert (config.num_levels, config.depth, config.num_layers) == (3, 3, 2)
    assert config.mask_token_id in (VOCAB - 1, 5)
    assert (config.markov_rank, config.causal) in ((64, False), (0, True))
    assert [len(level) for level in config.rank_accuracies] == [10, 10, 10]
    assert "embedding.weight" not in head.state_dict()


USED: dict[str, Callable[[Path], None]] = {
    "draft": check_draft,
    "redrafter": check_plain_head,
    "medusa": check_medusa,
    "eagle": check_eagle,
    "lyanna": check_lyanna,
    "dflash": check_dflash,
}


def check_use(kind: str, commands: Commands) -> None:
    """The folder is one that a spec-config may name, and `evaluate` may measure."""
    whole, figures = commands.folder / "whole", commands.folder / "figures.json"
    method = HEAD_METHODS.get(kind, "sd")
    depth = {"depth": 3} if kind == "dflash" else {}
    config = parse_spec_config({"method": method, "model": str(whole), **depth})
    check_weights(config)
    check_head_files(config)
    check_hot_tokens(config, VOCAB)
    if kind != "draft":
        check_head(config, commands.target.config)
        work = ["--work", str(whole / "work"), "--json", str(figures)]
        done = commands.run(f"evaluate {whole}", *work)
        assert done.exit_code == 0, done.output[-2000:]
        assert "t+3" in done.output
        found = json.loads(figures.read_text())
        assert found["text"] == ["text.jsonl"]
        assert [len(level) for level in found["accuracies"]] == [10, 10, 10]
        assert len(found["acceptance"]) == 3


QUICK = [
    ("draft", "llama", ""),
    ("medusa", "qwen", ""),
    ("eagle", "llama", ""),
]
THOROUGH = [
    ("redrafter", "llama", ""),
    ("redrafter", "qwen", ""),
    ("lyanna", "llama", ""),
    ("dflash", "llama", ""),
    ("redrafter", "opt", ""),
    ("medusa", "llama", ""),
    ("medusa", "opt", ""),
    ("eagle", "llama", NOISY),
    ("lyanna", "llama", "--hot-tokens 0 --feature-weight 0.1 --feature-noise 0.1"),
    ("dflash", "llama", "--causal --markov-rank 0 --hot-tokens 0 --mask-token 5"),
]


@pytest.mark.parametrize(
    ("kind", "family", "options"),
    cases([*QUICK, *THOROUGH], QUICK),
)
def test_from_text_to_a_drafter_in_use(
    kind: str, family: str, options: str, tmp_path: Path
) -> None:
    """Red when a kind cannot be trained, resumed from a checkpoint, saved or used."""
    target = make_target(family)
    commands = Commands(tmp_path, target)
    done = commands.train(kind, "whole", options)
    assert done.exit_code == 0, done.output[-2000:]
    num_steps, whole = commands.steps, tmp_path / "whole"

    # A cut run goes on from its checkpoint, and ends with the same weights.
    compute = Trainer.training_step
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pipeline, "plot_history", lambda *_: None)

        def cut(trainer: Trainer, *arguments: Any, **more: Any) -> Any:
            if trainer.state.global_step == CUT_AT:
                raise KeyboardInterrupt
            return compute(trainer, *arguments, **more)

        with patch.context() as interrupted:
            interrupted.setattr(Trainer, "training_step", cut)
            assert commands.train(kind, "cut", options).exit_code != 0
        assert not (tmp_path / "cut" / "model.safetensors").exists()
        done = commands.train(kind, "cut", options)
    assert done.exit_code == 0, done.output[-2000:]
    assert commands.steps == num_steps - SAVED > 0
    expected = load_file(whole / "model.safetensors")
    for name, value in load_file(tmp_path / "cut" / "model.safetensors").items():
        torch.testing.assert_close(value, expected[name])

    # What was learned, and how.
    record = json.loads((whole / "training.json").read_text())
    assert record["result"]["steps"] == num_steps
    if kind in ("draft", "redrafter", "medusa", "dflash"):
        assert record["result"]["kl"] < 0.9 * record["evaluations"][0]["eval_kl"]
    curves = whole / ("work" if kind == "draft" else "") / "curves.png"
    assert curves.stat().st_size > 0

    USED[kind](whole)
    check_use(kind, commands)
    # Other options, or a drafter of another form, do not go on from its checkpoints.
    form, key = ("--depth 4", ", depth") if "--depth" in GIVEN[kind] else ("", "")
    done = commands.train(kind, "whole", f"{options} --lr 1 {form}")
    assert done.exit_code == 1
    assert f"holds a run with other lr{key}" in done.output


def test_options_are_those_of_the_kinds() -> None:
    """Red when an option is left in the table that no kind has."""
    parts = [part for k in KINDS.values() for part in (k.run, k.shape, k.options)]
    assert OPTIONS.keys() <= {field.name for part in parts for field in fields(part)}
