"""Training of one-pass heads on a tiny random target."""

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from tests.dense_dflash import BlockAttention
from tests.fast.tiny_training import (
    STEPS,
    TARGET_SIZES,
    VOCAB,
    bigram_cache,
    shake,
    started,
    tiny_cache,
    tiny_target,
    trained,
)
from vllm_treespec.heads import DFlashHead
from vllm_treespec.train.batches import ContextDataset
from vllm_treespec.train.blocks import read_blocks
from vllm_treespec.train.dflash import DFlash
from vllm_treespec.train.optimizer import make_optimizer
from vllm_treespec.train.teacher import TeacherCache

ALL: dict[str, Any] = {"anchor_share": 1.0}


@pytest.fixture(scope="module")
def target() -> PreTrainedModel:
    return tiny_target()


@pytest.fixture(scope="module")
def cache(
    tmp_path_factory: pytest.TempPathFactory, target: PreTrainedModel
) -> TeacherCache:
    return tiny_cache(tmp_path_factory.mktemp("teacher"), target)


def served_logits(
    head: DFlashHead, states: Tensor, tokens: Tensor, anchor: int
) -> list[Tensor]:
    """Logits by level of the block at one token, below the text's own tokens.

    Args:
        head: to run.
        states: [n, features of the target], of a conversation.
        tokens: int64 [n + 1].
        anchor: its number.

    """
    places = torch.arange(anchor)
    context = head.context_kv(head.features(states[:anchor]), places)
    root = tokens[anchor : anchor + 1]
    block = head.block_tokens(root, head.config.num_levels)
    positions = anchor + torch.arange(block.shape[1])[None]
    attend = BlockAttention.of([context], head.config)
    draft = head.begin(head.read_block(block, positions, attend), root)
    found = [draft.root_logits()[0]]
    for token in tokens[anchor + 1 : anchor + head.config.num_levels]:
        logits = draft.extend(token[None, None], torch.zeros(1, 1, dtype=torch.int64))
        found.append(logits[0, 0])
    return found


@pytest.mark.parametrize(
    ("sizes", "windows"),
    [
        ({"markov_rank": 4}, {}),
        ({"markov_rank": 4, "causal": True, "num_hot_tokens": None}, {}),
        ({"markov_rank": 0, "num_layers": 1}, {}),
        ({"markov_rank": 4}, {"sliding_layers": (0, 1)}),
        ({"markov_rank": 4}, {"sliding_layers": (1,), "sliding_causal": True}),
    ],
)
def test_guesses_are_those_of_serving(
    target: PreTrainedModel,
    cache: TeacherCache,
    monkeypatch: pytest.MonkeyPatch,
    sizes: dict[str, Any],
    windows: dict[str, Any],
) -> None:
    """Red when a token, position, context or target of a block is another one's.

    Heads with windows are not trained, but evaluated.
    """
    # several groups a conversation, and no rounding
    monkeypatch.setattr("vllm_treespec.train.blocks._GROUP", 5)
    monkeypatch.setattr("torch.autocast", lambda *_, **__: nullcontext())
    # This teacher's likeliest token is the number of its position.
    told = replace(cache, ids=cache.positions[:, None].expand_as(cache.ids).int())
    drafter = started("dflash", target, told, ALL, **{"num_layers": 2, **sizes})
    head = shake(drafter.head)
    if windows:
        windows["sliding_window"] = head.config.block_size + 2
        head.config = head.config.model_copy(update=windows)
    data = ContextDataset(told, [0, 1, 2, 4], 200, head.config.layers)
    (number,) = range(len(data))
    inputs, longest = data[number], data[number]["states"].shape[1]
    levels, read, targets = drafter.guesses(inputs)
    found = zip(levels, read @ head.output_weight().T, targets.ids[:, 0], strict=True)
    for pair, left in zip(inputs["pairs"].tolist(), inputs["left"], strict=True):
        row = data.batches[number][pair // longest]
        first, end = cache.row_starts[row : row + 2].tolist()
        tokens, anchor = cache.token_ids[first:end].long(), pair % longest + 1
        states = inputs["states"][pair // longest, : end - first - 1].float()
        wanted = served_logits(head, states, tokens, anchor)[: int(left) + 1]
        for level, served in enumerate(wanted):
            found_level, logits, place = next(found)
            assert (int(found_level), int(place)) == (level, first + anchor + level)
            torch.testing.assert_close(logits, served, rtol=1e-5, atol=1e-5)
    assert next(found, None) is None


def test_a_block_sees_the_text_before_its_anchor_alone(
    target: PreTrainedModel, cache: TeacherCache
) -> None:
    """Red when a block sees a later token or hidden state, or another block."""
    head = shake(started("dflash", target, cache, markov_rank=4, num_layers=2).head)
    inputs = ContextDataset(cache, [4, 8], 200, head.config.layers)[0]
    anchors = torch.arange(len(inputs["pairs"]))
    before = read_blocks(head, inputs, anchors)
    longest, place = inputs["states"].shape[1], 12
    changed = {**inputs, "states": inputs["states"].clone()}
    changed["token_ids"] = inputs["token_ids"].clone()
    changed["states"][:, place:] += 1
    later = changed["token_ids"][:, place + 1 :]
    later.copy_((later + 1) % VOCAB)
    after = read_blocks(head, changed, anchors)
    # the block at that place reads its token, not its hidden state
    early = inputs["pairs"] % longest + 1 <= place
    assert early.any()
    assert torch.equal(after[early], before[early])
    assert (after[~early] != before[~early]).any(-1).all()


def test_anchors_are_drawn(target: PreTrainedModel, cache: TeacherCache) -> None:
    """Red when every step reads the same blocks, all of them, or none."""
    drafter = started("dflash", target, cache, {"anchor_share": 0.3}, markov_rank=4)
    shake(drafter.head)
    inputs = ContextDataset(cache, [0, 4, 8], 200, drafter.layers)[0]
    seeds = [torch.Generator().manual_seed(seed) for seed in (1, 1, 2)]
    losses = [drafter.loss(inputs, 0.0, generator).item() for generator in seeds]
    assert losses[0] == losses[1] != losses[2]
    drafter.options = replace(drafter.options, anchor_share=0.001)
    levels, _, _ = drafter.guesses(inputs)
    assert 1 <= len(levels) <= STEPS


def test_what_no_head_can_be_made_for_is_refused(target: PreTrainedModel) -> None:
    """Red when a missing token, or a small target, is a traceback."""
    with pytest.raises(ValueError, match=r"--mask-token 97 is no token .* 0 to 96"):
        DFlash.config_for(target, 8, mask_token=VOCAB)
    six = LlamaConfig(**{**TARGET_SIZES, "num_hidden_layers": 6})
    with pytest.raises(ValueError, match="this one has 6: train eagle"):
        DFlash.config_for(LlamaForCausalLM(six), 8)


@pytest.mark.thorough
def test_the_bias_is_of_the_parent(tmp_path: Path, target: PreTrainedModel) -> None:
    """Red when blocks do not learn, or the Markov bias is not of the token before."""
    cache = bigram_cache(tmp_path / "t", target)
    options = {"max_steps": 100, "lr": 1e-2, "eval_share": 0.1, "batch_tokens": 256}
    found: dict[int, dict[str, Any]] = {}
    for rank in (0, 32):
        sizes = {"markov_rank": rank, "num_hot_tokens": None, "block_size": 2}
        head = started("dflash", target, cache, {**ALL, **options}, **sizes)
        found[rank] = trained(head, cache, tmp_path / str(rank))
    first = found[32]["history"][0]["loss"]
    assert found[32]["kl"] < 0.5 * first
    assert found[32]["accuracy_2"] > found[0]["accuracy_2"] + 0.2
    # the block holds the token below which the first level is guessed
    assert found[0]["accuracy_1"] > found[0]["accuracy_2"] + 0.2


def test_a_schedule_reaches_both_optimizers(
    target: PreTrainedModel, cache: TeacherCache
) -> None:
    """Red when Muon or AdamW misses a weight, or a schedule after resuming."""
    drafter = started("dflash", target, cache, markov_rank=4)
    optimizer = make_optimizer(drafter)
    optimizer.load_state_dict(optimizer.state_dict())
    weights = [p for p in drafter.model.parameters() if p.requires_grad]
    grouped = [p for group in optimizer.param_groups for p in group["params"]]
    assert {*map(id, grouped)} == {*map(id, weights)}
    assert len(grouped) == len(weights)
    assert drafter.head.combine.weight is grouped[0]
    before = [weight.detach().clone() for weight in weights]
    for rate in (0.0, 0.5):
        for group in optimizer.param_groups:
            group["lr"] = rate
        for weight in weights:
            weight.grad = torch.randn_like(weight)
        optimizer.step()
        moved = [not w.equal(b) for w, b in zip(weights, before, strict=True)]
        assert all(moved) if rate else not any(moved)
