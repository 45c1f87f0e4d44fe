"""Unrolled training of heads that read pairs, on a tiny random target."""

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
    TrainingArguments,
)

from tests.fast.tiny_training import (
    HIDDEN,
    STEPS,
    TARGET_SIZES,
    VOCAB,
    assert_trained_as_served,
    bigram_cache,
    run_steps,
    shake,
    some_rows,
    started,
    tiny_cache,
    tiny_target,
    trained,
)
from vllm_treespec.sources.base import FINAL_LAYER
from vllm_treespec.train.batches import ContextDataset
from vllm_treespec.train.distill import DistillTrainer
from vllm_treespec.train.loss import TeacherTargets
from vllm_treespec.train.pair_heads import Eagle
from vllm_treespec.train.states import StateFiles
from vllm_treespec.train.teacher import TeacherCache
from vllm_treespec.train.unrolled import unrolled

EAGLE: dict[str, Any] = {"layers": "three"}
LYANNA: dict[str, Any] = {"token_info_rank": 4}
BIGRAM: dict[str, Any] = {"num_hot_tokens": None, "depth": 2}


@pytest.fixture(scope="module")
def target() -> PreTrainedModel:
    return tiny_target()


@pytest.fixture(scope="module")
def cache(
    tmp_path_factory: pytest.TempPathFactory, target: PreTrainedModel
) -> TeacherCache:
    return tiny_cache(tmp_path_factory.mktemp("teacher"), target)


@pytest.mark.parametrize(
    ("kind", "sizes"),
    [
        (
            "eagle",
            {**EAGLE, "norm_layers": True, "norm_output": True, "num_layers": 2},
        ),
        ("eagle", {"layers": "one"}),
        ("eagle", {"layers": "one", "version": 1}),
        ("lyanna", LYANNA),
        ("lyanna", {**LYANNA, "context": False}),
        ("lyanna", {"first_token": False, "token_info": "all", "num_layers": 2}),
        ("lyanna", {"first_token": False, "token_info_rank": 0, "context": False}),
    ],
)
def test_training_step_is_the_drafted_state_of_serving(
    target: PreTrainedModel,
    cache: TeacherCache,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    sizes: dict[str, Any],
) -> None:
    """Red when a step's token, position or context is not what serving has."""
    # several blocks a conversation
    monkeypatch.setattr("vllm_treespec.train.unrolled._BLOCK", 5)
    assert_trained_as_served(shake(started(kind, target, cache, **sizes).head), cache)


@pytest.mark.thorough
@pytest.mark.parametrize("sizes", [{"context": False}, {"num_hot_tokens": None}])
def test_every_weight_is_trained(
    tmp_path: Path, target: PreTrainedModel, cache: TeacherCache, sizes: dict[str, Any]
) -> None:
    """Red when a part of a head is left out of the optimizer or of the loss."""
    options = {"epochs": 1, "feature_weight": 0.1}
    drafter = started("lyanna", target, cache, options, **LYANNA, **sizes)
    trained(drafter, cache, tmp_path)
    fresh = started("lyanna", target, cache, **LYANNA, **sizes).head.state_dict()
    for name, value in drafter.head.state_dict().items():
        assert name == "hot_token_ids" or not torch.equal(value, fresh[name]), name


def test_no_step_sees_what_is_not_drafted_yet(
    target: PreTrainedModel, cache: TeacherCache
) -> None:
    """Red when a later token or hidden state, or another pair's draft, leaks."""
    head = shake(started("eagle", target, cache, **EAGLE).head)
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
            found = TeacherTargets.of(inputs).at(pairs + step).ids[:, 0]
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
def test_eagle_beats_medusa_at_the_second_token(
    tmp_path: Path, target: PreTrainedModel
) -> None:
    """Red when the drafted token is not read, or the unrolled steps do not learn."""
    cache = bigram_cache(tmp_path / "t", target)
    shared = {"max_steps": 120, "lr": 5e-3, "eval_share": 0.1}
    sizes = {**EAGLE, "norm_output": True, "norm_layers": True}
    options = {"batch_tokens": 512, "steps": 2, **shared}
    eagle = started("eagle", target, cache, options, **sizes, **BIGRAM)
    options = {"batch_positions": 512, **shared}
    medusa = started("medusa", target, cache, options, **BIGRAM)
    ours = trained(eagle, cache, tmp_path / "eagle")
    other = trained(medusa, cache, tmp_path / "medusa")
    assert ours["accuracy_2"] > other["accuracy_2"] + 0.2


def test_targets_that_have_no_such_layers_are_refused() -> None:
    """Red when layers would be read twice, or another kind of target is a KeyError."""
    six = LlamaConfig(**{**TARGET_SIZES, "num_hidden_layers": 6})
    with pytest.raises(ValueError, match="pass --layers one"):
        Eagle.config_for(LlamaForCausalLM(six), "three")
    opt = OPTConfig(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        word_embed_proj_dim=HIDDEN,
        num_hidden_layers=1,
        num_attention_heads=4,
        ffn_dim=48,
    )
    with pytest.raises(ValueError, match=r"intermediate_size, rms_norm_eps: EAGLE"):
        Eagle.config_for(OPTForCausalLM(opt), "one")


def test_levels_are_judged_with_the_served_logits(
    target: PreTrainedModel, cache: TeacherCache
) -> None:
    """Red when training judges, or learns, other logits than serving draws from."""
    drafter = started("lyanna", target, cache, **LYANNA)
    head = drafter.head
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
    level, quality = drafter.judged(inputs)
    assert level.bincount().tolist() == [
        int((inputs["left"] >= step).sum()) for step in range(STEPS)
    ]
    assert len(quality.rank) == len(level)


def test_a_fresh_chain_passes_the_state_of_the_target(
    target: PreTrainedModel, cache: TeacherCache
) -> None:
    """Red when a fresh head starts from noise, or its states have another size."""
    parts: dict[str, Any] = {"first_token": False, "context": False}
    head = started("lyanna", target, cache, **LYANNA, **parts).head
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
def test_token_info_beats_none_at_the_second_token(
    tmp_path: Path, target: PreTrainedModel
) -> None:
    """Red when token info is not of the parent, or does not learn."""
    cache = bigram_cache(tmp_path / "t", target)
    options = {"max_steps": 100, "lr": 1e-2, "eval_share": 0.1, "steps": 2}
    options["batch_tokens"] = 256
    found: dict[int, dict[str, Any]] = {}
    for rank in (0, 32):
        sizes = {**BIGRAM, "token_info_rank": rank}
        head = started("lyanna", target, cache, options, **sizes)
        found[rank] = trained(head, cache, tmp_path / str(rank))
    assert found[32]["accuracy_2"] > found[0]["accuracy_2"] + 0.2
    # the pair holds the token below which the first level is guessed
    assert found[0]["accuracy_1"] > found[0]["accuracy_2"] + 0.2


def test_token_info_has_a_learning_rate_of_its_own(
    tmp_path: Path, target: PreTrainedModel, cache: TeacherCache
) -> None:
    """Red when --token-info-lr has no effect, or a weight is in no group or in two."""
    drafter = started("lyanna", target, cache, {"token_info_lr": 0.5}, **LYANNA)
    head = drafter.head
    arguments = TrainingArguments(output_dir=str(tmp_path), report_to="none")
    trainer = DistillTrainer(drafter, args=arguments)
    groups = trainer.create_optimizer().param_groups
    rates = [(id(p), group["lr"]) for group in groups for p in group["params"]]
    assert sorted(p for p, _ in rates) == sorted(map(id, head.parameters()))
    fast = {p for p, rate in rates if rate == 0.5}
    assert fast == set(map(id, head.info.parameters()))


def test_the_loss_on_states_is_their_mean_square_error(
    target: PreTrainedModel, cache: TeacherCache
) -> None:
    """Red when --feature-weight has no effect, or compares with another place."""
    inputs = ContextDataset(cache, [0, 3, 4, 8], 200, (FINAL_LAYER,))[0]
    drafter = started("lyanna", target, cache, **LYANNA)
    head = shake(drafter.head)
    losses = []
    for weight in (0.0, 10.0):
        drafter.options = replace(drafter.options, feature_weight=weight)
        losses.append(drafter.loss(inputs, 0.0, torch.Generator()).item())
    states = inputs["states"].float()
    total = 0.0
    for step, (kept, out, _) in enumerate(unrolled(head, states, inputs, STEPS)):
        # the state of the token before the guess
        wanted = states.flatten(0, 1)[inputs["pairs"][kept] + 1 + step]
        total += 0.8**step * (out - wanted).square().mean().item()
    expected = 10 * total / (1 + 0.8 + 0.8**2)
    assert losses[1] - losses[0] == pytest.approx(expected, rel=0.01)
