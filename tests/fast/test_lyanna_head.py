"""Lyanna's head: its chain, its token info, its folder."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.fast.tiny_training import PlainAttention
from tests.heads import lyanna_head, write_head
from vllm_treespec.heads import (
    HeadError,
    LyannaHead,
    LyannaHeadConfig,
    load_eagle_head,
    load_lyanna_head,
    read_head_config,
)
from vllm_treespec.heads.base import unit_rms

VOCAB, HOT, HIDDEN = 32, 20, 64


def ready(**config: Any) -> LyannaHead:
    """A head in float64 that shares random weights and drafts random tokens."""
    head = lyanna_head(vocab_size=VOCAB, **config).double()
    if head.hot_token_ids is not None:
        hot = torch.randperm(VOCAB)[: len(head.hot_token_ids)]
        head.hot_token_ids.copy_(hot.sort().values)
    head.share(*torch.randn(2, VOCAB, HIDDEN, dtype=torch.float64))
    return head


@pytest.mark.parametrize("hot", [HOT, None])
@pytest.mark.parametrize("told", ["hot", "all"])
def test_token_info_is_the_normed_table(told: str, hot: int | None) -> None:
    """Red when the norm, its weight, the hot tokens or the order of columns is off."""
    head = ready(token_info=told, num_hot_tokens=hot)
    info = head.info
    assert info is not None
    table = unit_rms(head.embedding.weight) @ info.down.weight.T @ info.up.T
    mean_square = table.pow(2).mean(-1, keepdim=True)
    table = table / (mean_square + head.config.norm_eps).sqrt() * info.gain
    if told == "hot" and head.hot_token_ids is not None:
        cold = torch.ones(VOCAB, dtype=torch.bool)
        cold[head.hot_token_ids] = False
        assert cold.any()
        table[cold] = 0
    token_ids = torch.arange(VOCAB).view(4, 8)
    exact: dict[str, Any] = {"rtol": 0, "atol": 1e-12}
    served = head.info_logits(token_ids)
    torch.testing.assert_close(served, table.view(4, 8, -1), **exact)
    # what training computes
    states = torch.randn(4, 8, HIDDEN, dtype=torch.float64)
    trained = head.output_inputs_after(states, token_ids) @ head.output_weight().T
    torch.testing.assert_close(trained, head.logits(states) + served, **exact)


def test_no_token_info_adds_nothing() -> None:
    """Red when a head of rank 0 has weights for it, or its zeros have another shape."""
    head = ready(token_info_rank=0, num_hot_tokens=HOT)
    assert not [name for name in head.state_dict() if name.startswith("info")]
    added = head.info_logits(torch.zeros(2, 3, dtype=torch.int64))
    assert added.shape == (2, 3, HOT)
    assert not added.any()
    assert head.output_columns() is None


@pytest.mark.parametrize("first_token", [True, False])
def test_reading_by_parts_is_reading_at_once(first_token: bool) -> None:
    """Red when a pair's state hangs on how the text was cut, or on what it leaves."""
    head = ready(first_token=first_token)
    features = torch.randn(9, HIDDEN, dtype=torch.float64)
    token_ids = torch.randint(VOCAB, (9,))
    positions = torch.arange(9)
    whole = head.read(features, token_ids, positions, PlainAttention())
    attend, parts = PlainAttention(), []
    for part in (slice(0, 4), slice(4, 5), slice(5, 9)):
        parts.append(
            head.read(features[part], token_ids[part], positions[part], attend)
        )
    torch.testing.assert_close(torch.cat(parts), whole)
    other = head.read(features, (token_ids + 1) % VOCAB, positions, PlainAttention())
    assert torch.equal(other, whole) is not first_token


def test_later_steps_read_the_state_alone() -> None:
    """Red when a chain's later step is fused with something, or not normed."""
    head = ready()
    state = 100 * torch.randn(1, HIDDEN, dtype=torch.float64)
    out = head.read(state, None, torch.tensor([5]), PlainAttention())
    (layer,) = head.layers
    angles = head.rotary.angles(torch.tensor([5]))
    expected = layer(head.fused_norm(state), state, angles, PlainAttention())
    torch.testing.assert_close(out, head.norm(expected))
    torch.testing.assert_close(head.logits(out), out @ head.output.weight.T)


@pytest.mark.parametrize("config", [{}, {"first_token": False, "token_info_rank": 0}])
def test_saved_heads_come_back(tmp_path: Path, config: dict[str, Any]) -> None:
    """Red when a weight is not saved, or shared ones are."""
    config = {"num_hot_tokens": HOT, "context": False, **config}
    folder = write_head(tmp_path / "head", "lyanna", **config)
    head, same = lyanna_head(**config).bfloat16(), load_lyanna_head(folder)
    assert same.config == read_head_config(folder) == head.config
    assert not same.context
    tensors = load_file(tmp_path / "head" / "model.safetensors")
    assert set(tensors) == set(same.state_dict())
    assert ("fuse.weight" in tensors) is same.config.first_token
    assert not {"embedding.weight", "output.weight", "info.table"} & set(tensors)
    for name, tensor in head.state_dict().items():
        assert torch.equal(same.state_dict()[name].to(tensor.dtype), tensor), name
    assert not any(weight.requires_grad for weight in same.parameters())
    tensors["hot_token_ids"] = tensors["hot_token_ids"].int()
    save_file(tensors, tmp_path / "head" / "model.safetensors")
    hot = load_lyanna_head(folder).state_dict()["hot_token_ids"]
    assert hot.dtype == torch.int64


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("rank", 3, "rank"),
        ("version", 3, "version"),
        ("first_token", 1, "first_token"),
        ("token_info_rank", -1, "token_info_rank"),
        ("token_info_rank", True, "token_info_rank"),
        ("token_info", "dense", "token_info"),
        ("norm_output", False, "norm_output"),
        ("norms", ["fused"], "norms must hold 'output'"),
        ("target_layers", [2, 4], "reads the final hidden state alone"),
        ("combines", True, "reads the final hidden state alone"),
        ("target_hidden_size", 65, "must be the same"),
    ],
)
def test_wrong_configurations_are_refused(
    tmp_path: Path, key: str, value: object, words: str
) -> None:
    """Red when a key or a value that the head has not is read over."""
    file = Path(write_head(tmp_path / "head", "lyanna")) / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), key: value}))
    with pytest.raises(HeadError, match="is not the configuration of a head") as error:
        read_head_config(file.parent)
    assert words in str(error.value)


def test_weights_of_another_rank_are_refused(tmp_path: Path) -> None:
    """Red when a head runs with fresh token info in place of what is missing."""
    file = Path(write_head(tmp_path, "lyanna", token_info_rank=0)) / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "token_info_rank": 4}))
    with pytest.raises(HeadError, match=r"config\.json: missing .*info\.up"):
        load_lyanna_head(tmp_path)


def test_heads_of_other_kinds_are_refused(tmp_path: Path) -> None:
    """Red when a Lyanna head is loaded as the EAGLE head that it extends."""
    lyanna = write_head(tmp_path / "lyanna", "lyanna")
    with pytest.raises(HeadError, match="a lyanna head; name an eagle head"):
        load_eagle_head(lyanna)
    with pytest.raises(HeadError, match="an eagle head; name a lyanna head, or train"):
        load_lyanna_head(write_head(tmp_path / "eagle", "eagle"))


def test_defaults_are_those_of_the_documents() -> None:
    """Red when a default changes and docs/train.md does not."""
    sizes: dict[str, Any] = {"hidden_size": 8, "vocab_size": 9, "target_hidden_size": 8}
    sizes |= {"num_heads": 1, "num_kv_heads": 1, "head_size": 8, "intermediate_size": 8}
    config = LyannaHeadConfig(**sizes)
    assert (config.first_token, config.context) == (True, True)
    assert (config.token_info_rank, config.token_info) == (64, "hot")
    assert config.norms == ("embedding", "fused", "output")
