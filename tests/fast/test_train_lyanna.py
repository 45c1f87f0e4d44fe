"""Unrolled training of Lyanna heads, on random targets of a few thousand parameters."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, TrainingArguments
from typer.testing import CliRunner

from tests.fast.pair_training import (
    HIDDEN,
    OPTIONS,
    STEPS,
    VOCAB,
    assert_trained_as_served,
    bigram_cache,
    resumed_after_a_cut,
    shake,
    some_rows,
    tiny_cache,
    tiny_target,
)
from vllm_treespec.heads import LyannaHead, load_lyanna_head
from vllm_treespec.sources.base import FINAL_LAYER
from vllm_treespec.train.cli import app
from vllm_treespec.train.context_batches import ContextDataset
from vllm_treespec.train.head import draft_vocab_rows
from vllm_treespec.train.pair_head import (
    PairOptions,
    PairTrainer,
    drafted_quality,
    train_pair_head,
)
from vllm_treespec.train.pair_start import lyanna_config, start_pair_head
from vllm_treespec.train.teacher import TeacherCache
from vllm_treespec.train.unrolled import unrolled

SIZES = {"num_hot_tokens": 60, "depth": STEPS, "token_info_rank": 4}


@pytest.fixture(scope="module")
def target() -> PreTrainedModel:
    """A random target."""
    return tiny_target()


@pytest.fixture(scope="module")
def cache(
    tmp_path_factory: pytest.TempPathFactory, target: PreTrainedModel
) -> TeacherCache:
    """What it says of random text."""
    return tiny_cache(tmp_path_factory.mktemp("teacher"), target)


def fresh_head(
    target: PreTrainedModel, cache: TeacherCache, **sizes: Any
) -> LyannaHead:
    """A head as training starts it."""
    torch.manual_seed(3)
    config = lyanna_config(target, {**SIZES, **sizes})
    head = start_pair_head(config, target, cache.statistics)
    assert isinstance(head, LyannaHead)
    return head


@pytest.mark.parametrize(
    "sizes",
    [
        {},
        {"context": False},
        {"first_token": False, "token_info": "all", "num_layers": 2},
        {"first_token": False, "token_info_rank": 0, "context": False},
    ],
)
def test_training_step_is_the_chain_of_serving(
    target: PreTrainedModel,
    cache: TeacherCache,
    monkeypatch: pytest.MonkeyPatch,
    sizes: dict[str, Any],
) -> None:
    """Red when a step's token, position or context is not what serving has."""
    # several blocks a conversation
    monkeypatch.setattr("vllm_treespec.train.unrolled._BLOCK", 5)
    head = fresh_head(target, cache, **sizes)
    assert_trained_as_served(shake(head), cache)


def test_levels_are_judged_with_the_served_logits(
    target: PreTrainedModel, cache: TeacherCache
) -> None:
    """Red when training judges, or learns, other logits than serving draws from."""
    head = fresh_head(target, cache)
    shake(head)
    head.share(
        target.get_input_embeddings().weight, target.get_output_embeddings().weight
    )
    inputs = ContextDataset(cache, [4, 8], 200, (FINAL_LAYER,))[0]
    features = head.features(inputs["states"].float())
    for kept, out, before in unrolled(head, features, inputs, STEPS):
        trained = head.output_inputs_after(out, before) @ head.output_weight().T
        served = head.logits(out) + head.info_logits(before)
        torch.testing.assert_close(trained, served, rtol=1e-5, atol=1e-5)
        assert len(kept)
    # the level of a guess, and the place of the target's likeliest token
    level, quality = drafted_quality(head, inputs, draft_vocab_rows(head))
    assert level.bincount().tolist() == [
        int((inputs["left"] >= step).sum()) for step in range(STEPS)
    ]
    assert len(quality.rank) == len(level)


def test_a_fresh_chain_passes_the_state_of_the_target(
    target: PreTrainedModel, cache: TeacherCache
) -> None:
    """Red when a fresh head starts from noise, or its states have another size."""
    head = fresh_head(target, cache, first_token=False, context=False)
    inputs = ContextDataset(cache, [4, 8], 200, (FINAL_LAYER,))[0]
    states = inputs["states"].float()
    size = states.square().mean().sqrt().item()
    head.requires_grad_(False)
    for kept, out, _ in unrolled(head, head.features(states), inputs, STEPS):
        state = states.flatten(0, 1)[inputs["pairs"][kept]]
        alike = torch.cosine_similarity(out, state, dim=-1)
        torch.testing.assert_close(alike, torch.ones(len(kept)))
        assert out.square().mean().sqrt().item() == pytest.approx(size, rel=0.2)


@pytest.mark.thorough
@pytest.mark.parametrize("sizes", [{"context": False}, {"num_hot_tokens": None}])
def test_cut_run_resumes_to_the_same_weights(
    tmp_path: Path,
    target: PreTrainedModel,
    cache: TeacherCache,
    sizes: dict[str, Any],
) -> None:
    """Red when a part of the head or of the optimizer's state is not resumed."""

    def run(folder: str, save_steps: int) -> dict[str, Tensor]:
        head = fresh_head(target, cache, **sizes)
        options = replace(OPTIONS, epochs=1, save_steps=save_steps, feature_weight=0.1)
        train_pair_head(head, cache, tmp_path / folder, options)
        return head.state_dict()

    uncut = run("uncut", save_steps=1000)
    fresh = fresh_head(target, cache, **sizes).state_dict()
    for name, value in resumed_after_a_cut(lambda every: run("cut", every)).items():
        torch.testing.assert_close(value, uncut[name])
        assert name == "hot_token_ids" or not torch.equal(value, fresh[name]), name


@pytest.mark.thorough
def test_token_info_beats_none_at_the_second_token(
    tmp_path: Path, target: PreTrainedModel
) -> None:
    """Red when token info is not of the parent, or does not learn."""
    cache = bigram_cache(tmp_path / "t", target)
    options = PairOptions(
        max_steps=100, lr=1e-2, eval_share=0.1, batch_tokens=256, steps=2
    )
    found: dict[int, dict[str, Any]] = {}
    for rank in (0, 32):
        sizes = {"num_hot_tokens": None, "depth": 2, "token_info_rank": rank}
        head = fresh_head(target, cache, **sizes)
        found[rank] = train_pair_head(head, cache, tmp_path / str(rank), options)
    assert found[32]["accuracy_2"] > found[0]["accuracy_2"] + 0.2
    # the pair holds the token below which the first level is guessed
    assert found[0]["accuracy_1"] > found[0]["accuracy_2"] + 0.2


def test_token_info_has_a_learning_rate_of_its_own(
    tmp_path: Path, target: PreTrainedModel, cache: TeacherCache
) -> None:
    """Red when --token-info-lr has no effect, or a weight is in no group or in two."""
    head = fresh_head(target, cache)
    trainer = PairTrainer(
        options=replace(OPTIONS, token_info_lr=0.5),
        model=nn.ModuleDict({"head": head}),
        args=TrainingArguments(output_dir=str(tmp_path), report_to="none"),
    )
    assert head.info is not None
    groups = trainer.create_optimizer().param_groups
    rates = [(id(p), group["lr"]) for group in groups for p in group["params"]]
    assert sorted(p for p, _ in rates) == sorted(map(id, head.parameters()))
    fast = {p for p, rate in rates if rate == 0.5}
    assert fast == set(map(id, head.info.parameters()))


def test_the_loss_on_states_is_their_mean_square_error(
    tmp_path: Path, target: PreTrainedModel, cache: TeacherCache
) -> None:
    """Red when --feature-weight has no effect, or compares with another place."""
    head = shake(fresh_head(target, cache))
    inputs = ContextDataset(cache, [0, 3, 4, 8], 200, (FINAL_LAYER,))[0]
    losses = []
    for weight in (0.0, 10.0):
        trainer = PairTrainer(
            options=replace(OPTIONS, steps=STEPS, feature_weight=weight),
            model=nn.ModuleDict({"head": head}),
            args=TrainingArguments(output_dir=str(tmp_path), report_to="none"),
        )
        losses.append(trainer.compute_loss(None, inputs).item())
    states = inputs["states"].float()
    total = 0.0
    for step, (kept, out, _) in enumerate(unrolled(head, states, inputs, STEPS)):
        # the state of the token before the guess
        wanted = states.flatten(0, 1)[inputs["pairs"][kept] + 1 + step]
        total += 0.8**step * (out - wanted).square().mean().item()
    expected = 10 * total / (1 + 0.8 + 0.8**2)
    assert losses[1] - losses[0] == pytest.approx(expected, rel=0.01)


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
    command = ["lyanna", *shared, "--out", str(out), "--max-steps", "4"]
    command += ["--batch-tokens", "64", "--hot-tokens", "60", "--depth", "3"]
    command += ["--no-context", "--token-info", "all", "--token-info-rank", "8"]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.output[-2000:]
    head = load_lyanna_head(out)
    assert (head.context, head.config.first_token) == (False, True)
    assert (head.config.token_info, head.config.token_info_rank) == ("all", 8)
    assert (head.config.hidden_size, head.config.vocab_size) == (HIDDEN, VOCAB)
    assert [len(level) for level in head.config.rank_accuracies] == [10, 10, 10]
    record = json.loads((out / "training.json").read_text())
    assert record["result"]["steps"] == 4
    assert record["training"]["steps"] == 3
    assert record["teacher"]["layers"] == [FINAL_LAYER]
    assert record["head"] == {
        "first_token": True,
        "context": False,
        "token_info_rank": 8,
        "token_info": "all",
    }
    assert (out / "curves.png").stat().st_size > 0
    measured = tmp_path / "evaluation.json"
    command = ["evaluate", str(out), *shared, "--json", str(measured)]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.output[-2000:]
    found = json.loads(measured.read_text())
    assert len(found["acceptance"]) == len(found["accuracies"]) == 3
    # Another variant does not go on from this one's checkpoints.
    command = ["lyanna", *shared, "--out", str(out), "--hot-tokens", "60"]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 1
    assert "holds a run with other batch_tokens, depth, context" in done.output
