"""Unrolled training of EAGLE heads, on random targets of a few thousand parameters."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    PreTrainedModel,
)
from typer.testing import CliRunner

from tests.fast.pair_training import (
    HIDDEN,
    OPTIONS,
    STEPS,
    VOCAB,
    assert_trained_as_served,
    bigram_cache,
    resumed_after_a_cut,
    run_steps,
    shake,
    some_rows,
    tiny_cache,
    tiny_target,
)
from vllm_treespec.heads import load_eagle_head
from vllm_treespec.heads.eagle import EagleHead
from vllm_treespec.sources.base import FINAL_LAYER
from vllm_treespec.train.batches import split_rows
from vllm_treespec.train.cli import app
from vllm_treespec.train.context_batches import ContextDataset
from vllm_treespec.train.distill import targets_of
from vllm_treespec.train.head import HeadOptions, train_head
from vllm_treespec.train.pair_head import (
    PairOptions,
    entries,
    train_pair_head,
)
from vllm_treespec.train.pair_start import eagle_config, start_pair_head
from vllm_treespec.train.pipeline import start_head
from vllm_treespec.train.states import StateFiles
from vllm_treespec.train.teacher import (
    TeacherCache,
)

SIZES = {"num_hot_tokens": 60, "depth": STEPS}


@pytest.fixture(scope="module")
def target() -> PreTrainedModel:
    return tiny_target()


@pytest.fixture(scope="module")
def cache(
    tmp_path_factory: pytest.TempPathFactory, target: PreTrainedModel
) -> TeacherCache:
    return tiny_cache(tmp_path_factory.mktemp("teacher"), target)


def fresh_head(
    target: PreTrainedModel,
    cache: TeacherCache,
    layers: str = "three",
    seed: int = 3,
    **sizes: Any,
) -> EagleHead:
    """A head whose attention and MLP do something."""
    torch.manual_seed(seed)
    config = eagle_config(target, layers, {**SIZES, **sizes})
    return shake(start_pair_head(config, target, cache.statistics))


@pytest.mark.parametrize(
    ("layers", "sizes"),
    [
        ("three", {"norm_layers": True, "norm_output": True, "num_layers": 2}),
        ("one", {}),
        ("one", {"version": 1}),
    ],
)
def test_training_step_is_the_drafted_state_of_serving(
    target: PreTrainedModel,
    cache: TeacherCache,
    monkeypatch: pytest.MonkeyPatch,
    layers: str,
    sizes: dict[str, Any],
) -> None:
    """Red when a step's token, position or context is not what serving has."""
    # several blocks a conversation
    monkeypatch.setattr("vllm_treespec.train.unrolled._BLOCK", 5)
    assert_trained_as_served(fresh_head(target, cache, layers, **sizes), cache)


def test_no_step_sees_what_is_not_drafted_yet(
    target: PreTrainedModel, cache: TeacherCache
) -> None:
    """Red when a later token or hidden state, or another pair's draft, leaks."""
    head = fresh_head(target, cache)
    data = ContextDataset(cache, [4, 8], 200, head.config.layers)
    inputs = data[0]
    before = run_steps(head, inputs)
    longest, place = inputs["states"].shape[1], 12
    changed = {**inputs, "states": inputs["states"].clone()}
    changed["token_ids"] = inputs["token_ids"].clone()
    changed["states"][:, place:] += 1
    changed["token_ids"][:, place:] = (changed["token_ids"][:, place:] + 1) % VOCAB
    for step, after in enumerate(run_steps(head, changed)):
        # pair i's last token in this step is i + 1 + step
        early = inputs["pairs"] % longest + 1 + step < place
        assert early.any()
        torch.testing.assert_close(after[early], before[step][early], equal_nan=True)
        assert (after[~early] != before[step][~early]).any(1).all()


def test_each_step_is_judged_by_the_teacher_after_its_last_token(
    cache: TeacherCache,
) -> None:
    """Red when a step's targets are off by one, or a row's end is."""
    # This teacher's likeliest token is the number of its position.
    told = replace(cache, ids=cache.positions[:, None].expand_as(cache.ids).int())
    data = ContextDataset(told, list(range(told.num_rows)), 64, (FINAL_LAYER,))
    judged = 0
    for number in range(len(data)):
        inputs = data[number]
        longest = inputs["states"].shape[1]
        starts = told.row_starts[data.batches[number]].long()
        for step in range(STEPS):
            (pairs,) = (inputs["left"] >= step).nonzero(as_tuple=True)
            place = inputs["pairs"][pairs]
            wanted = starts[place // longest] + place % longest + 1 + step
            found = entries(targets_of(inputs), pairs + step).ids[:, 0]
            assert torch.equal(found, wanted)
            judged += len(pairs)
    rows = [row for row in some_rows(3) if len(row.token_ids) > row.prompt_len]
    answers = [len(row.token_ids) - row.prompt_len for row in rows]
    # an answer's first token is guessed too, by the prompt's last pair
    assert data.num_positions == sum(answers) - sum(r.prompt_len == 1 for r in rows)
    assert judged == sum(
        max(0, n - (row.prompt_len == 1) - step)
        for n, row in zip(answers, rows, strict=True)
        for step in range(STEPS)
    )


def test_a_batch_reads_its_conversations_and_layers_only(
    cache: TeacherCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Red when hidden states of other rows or layers are read from disk."""
    data = ContextDataset(cache, [0, 4, 8, 13], 70, (2, 4))
    asked = []
    read = StateFiles.read

    def noted(
        self: StateFiles, layers: tuple[int, ...], first: int, end: int
    ) -> Tensor:
        asked.append((layers, first, end))
        return read(self, layers, first, end)

    monkeypatch.setattr(StateFiles, "read", noted)
    inputs = data[0]
    starts = cache.row_starts.tolist()
    rows = data.batches[0]
    assert asked == [((2, 4), starts[r], starts[r + 1] - 1) for r in rows]
    assert inputs["states"].shape[2] == 2 * HIDDEN
    with pytest.raises(ValueError, match=r"no hidden states of \[5\]"):
        ContextDataset(cache, [0], 70, (2, 5))


@pytest.mark.thorough
@pytest.mark.parametrize(
    "changes", [{"feature_noise": 0.1, "feature_weight": 1.0}, {"max_steps": 12}]
)
def test_cut_run_resumes_to_the_same_weights(
    tmp_path: Path,
    target: PreTrainedModel,
    cache: TeacherCache,
    changes: dict[str, Any],
) -> None:
    """Red when noise, the order of batches or the optimizer's state is not resumed."""

    def run(folder: str, save_steps: int) -> dict[str, Tensor]:
        torch.manual_seed(0)
        config = eagle_config(target, "one", SIZES)
        head = start_pair_head(config, target, cache.statistics)
        options = replace(OPTIONS, epochs=1, save_steps=save_steps, **changes)
        train_pair_head(head, cache, tmp_path / folder, options)
        return head.state_dict()

    uncut = run("uncut", save_steps=1000)
    resumed = resumed_after_a_cut(lambda save_steps: run("cut", save_steps))
    for name, value in resumed.items():
        torch.testing.assert_close(value, uncut[name])


@pytest.mark.thorough
def test_eagle_beats_medusa_at_the_second_token(
    tmp_path: Path, target: PreTrainedModel
) -> None:
    """Red when the drafted token is not read, or the unrolled steps do not learn."""
    cache = bigram_cache(tmp_path / "t", target)
    shared: dict[str, Any] = {"max_steps": 120, "lr": 5e-3, "eval_share": 0.1}
    sizes = {"depth": 2, "norm_output": True, "norm_layers": True}
    eagle = start_pair_head(
        eagle_config(target, "three", sizes), target, cache.statistics
    )
    options = PairOptions(batch_tokens=512, steps=2, **shared)
    ours = train_pair_head(eagle, cache, tmp_path / "eagle", options)
    medusa = start_head("medusa", {"depth": 2}, target, cache.statistics)
    other = train_head(
        medusa, cache, tmp_path / "medusa", HeadOptions(batch_positions=512, **shared)
    )
    assert ours["accuracy_2"] > other["accuracy_2"] + 0.2


def test_share_of_the_text_keeps_the_evaluation(cache: TeacherCache) -> None:
    """Red when --text-share moves evaluation rows, or trains on them."""
    all_rows, evaluation = split_rows(cache, 0.2, 0)
    part, same = split_rows(cache, 0.2, 0, text_share=0.5)
    assert same == evaluation
    assert set(part) < set(all_rows)
    assert abs(len(part) - len(all_rows) / 2) <= 1


def test_commands_train_and_evaluate(tmp_path: Path, target: PreTrainedModel) -> None:
    """Red when the command, the folder it writes or its evaluation breaks."""
    target.save_pretrained(tmp_path / "target")
    text = tmp_path / "text.jsonl"
    rows = [
        {"token_ids": r.token_ids, "prompt_len": r.prompt_len} for r in some_rows(6)
    ]
    text.write_text("".join(json.dumps(row) + "\n" for row in rows))
    shared = ["--target", str(tmp_path / "target"), "--text", str(text)]
    shared += ["--work", str(tmp_path / "work"), "--top-k", "16"]
    out = tmp_path / "head"
    command = ["eagle", *shared, "--out", str(out), "--max-steps", "4"]
    command += ["--batch-tokens", "64", "--hot-tokens", "60", "--depth", "3"]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.output[-2000:]
    head = load_eagle_head(out)
    assert head.config.target_layers == (2, 3, 4)
    assert [len(level) for level in head.config.rank_accuracies] == [10, 10, 10]
    assert "embedding.weight" not in head.state_dict()
    record = json.loads((out / "training.json").read_text())
    assert record["result"]["steps"] == 4
    assert record["teacher"]["layers"] == [2, 3, 4]
    assert (out / "curves.png").stat().st_size > 0
    measured = tmp_path / "evaluation.json"
    command = ["evaluate", str(out), *shared, "--json", str(measured)]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.output[-2000:]
    assert "t+3" in done.output
    found = json.loads(measured.read_text())
    assert found["text"] == ["text.jsonl"]
    assert len(found["acceptance"]) == len(found["accuracies"]) == 3
    # A head that needs fewer layers trains from the same cache.
    command = ["medusa", *shared, "--out", str(tmp_path / "medusa"), "--max-steps", "2"]
    done = CliRunner().invoke(app, [*command, "--hot-tokens", "60"])
    # its layer was not kept: the shards are made again, with it
    assert done.exit_code == 0, done.output[-2000:]


def test_small_targets_have_no_three_layers() -> None:
    """Red when layers would be read twice."""
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        num_hidden_layers=6,
        num_attention_heads=4,
        intermediate_size=48,
    )
    with pytest.raises(ValueError, match="pass --layers one"):
        eagle_config(LlamaForCausalLM(config), "three", {})


def test_targets_of_another_kind_are_refused() -> None:
    """Red when a target without the sizes of a Llama layer ends in a KeyError."""
    config = OPTConfig(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        word_embed_proj_dim=HIDDEN,
        num_hidden_layers=1,
        num_attention_heads=4,
        ffn_dim=48,
    )
    with pytest.raises(ValueError, match=r"intermediate_size, rms_norm_eps: EAGLE"):
        eagle_config(OPTForCausalLM(config), "one", {})
