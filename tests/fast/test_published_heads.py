"""Published EAGLE heads: every form is read, and computes what the papers say."""

import json
import logging
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig

from tests.fast.tiny_training import PlainAttention
from tests.published_heads import PublishedHead
from tests.reference.eagle import ReferenceEagle
from vllm_treespec.heads import (
    EagleHead,
    EagleHeadConfig,
    load_eagle_head,
    read_head_config,
    save_head,
)
from vllm_treespec.heads.checkpoint import INDEX

NUM_LAYERS = 8
LENGTH = 6
LLAMA_3 = {
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
ALL_NORMS = ("embed_layernorm", "hidden_layernorm", "lm_head_layernorm")
HEADS = {
    "eagle": PublishedHead("eagle"),
    "eagle, fc.bias, lm_head missing": PublishedHead(
        "eagle", fc_bias=True, lm_head=False, embed_tokens=True
    ),
    "eagle, Vicuna's config": PublishedHead(
        "eagle", num_kv_heads=None, head_dim=None, rope={}, keys={"model_type": None}
    ),
    "eagle, Qwen2": PublishedHead(
        "eagle", qkv_bias=True, embed_tokens=True, keys={"model_type": "qwen2"}
    ),
    "eagle, two layers": PublishedHead("eagle", num_layers=2, fc_bias=True),
    "eagle, norms": PublishedHead("eagle", norms=ALL_NORMS),
    "eagle, one norm": PublishedHead("eagle", norms=ALL_NORMS[2:], num_layers=2),
    "eagle3": PublishedHead(draft_vocab_size=12),
    "eagle3, whole vocabulary": PublishedHead(embed_tokens=True),
    "eagle3, rows not ascending": PublishedHead(
        draft_vocab_size=4, draft_ids=(30, 2, 39, 7)
    ),
    "eagle3, permuted vocabulary": PublishedHead(
        vocab_size=5, draft_vocab_size=5, draft_ids=(3, 2, 4, 0, 1)
    ),
    "eagle3, target's rows": PublishedHead(draft_vocab_size=12, lm_head=False),
    "eagle3, wider target": PublishedHead(target_hidden_size=20, layer_ids=(1, 3)),
    "eagle3, layers.0": PublishedHead("eagle3 layers.0", qkv_bias=True),
    "eagle3, final state": PublishedHead(use_aux_hidden_state=False, layer_ids=None),
    "eagle3, all norms": PublishedHead(
        norm_before_residual=True, norm_before_fc=True, fc_norm=True, norm_output=True
    ),
    "eagle3, three layers": PublishedHead(num_layers=3, qk_norm=True),
    "eagle3, linear RoPE": PublishedHead(
        rope={"rope_scaling": {"type": "linear", "factor": 3.0}}
    ),
    "eagle3, Llama 3's RoPE": PublishedHead(
        rope={"rope_theta": 1e4, "rope_scaling": LLAMA_3}
    ),
    "eagle3, transformers 5": PublishedHead(
        rope={"rope_parameters": {"rope_type": "default", "rope_theta": 7.0}}
    ),
    "speculators": PublishedHead("speculators", draft_vocab_size=12),
    "speculators, Qwen3": PublishedHead(
        "speculators", qk_norm=True, norm_before_residual=True, fc_norm=True
    ),
    "speculators, no layers named": PublishedHead(
        "speculators", layer_ids=None, norm_before_fc=True, norm_output=True
    ),
}


def loaded(published: PublishedHead, folder: Path) -> EagleHead:
    """The head, with the target's weights."""
    return shared(load_eagle_head(published.write(folder), NUM_LAYERS), published)


def shared(head: EagleHead, published: PublishedHead) -> EagleHead:
    """The head, with the target's weights."""
    head.share(*published.target_weights())
    return head


def run(
    head: EagleHead, published: PublishedHead, chunks: tuple[int, ...]
) -> tuple[Tensor, Tensor]:
    """Read a sequence in chunks, then two drafted tokens; outputs and logits."""
    states, token_ids = sequence(published)
    attend, outputs, start = PlainAttention(), [], 0
    features = head.features(states)
    for length in chunks:
        end = start + length
        rows = torch.arange(start, end)
        outputs.append(head.read(features[rows], token_ids[rows], rows, attend))
        start = end
    for position in (LENGTH, LENGTH + 1):
        row = torch.tensor([position])
        outputs.append(head.read(outputs[-1][-1:], token_ids[row], row, attend))
    out = torch.cat(outputs)
    return out, head.logits(out)


def sequence(published: PublishedHead) -> tuple[Tensor, Tensor]:
    """Hidden states of a text, and the tokens after each and after two drafts."""
    generator = torch.Generator().manual_seed(3)
    width = published.num_states * published.target_size
    states = torch.randn((LENGTH, width), generator=generator)
    tokens = torch.randint(published.vocab_size, (LENGTH + 2,), generator=generator)
    return states.double(), tokens


def reference(published: PublishedHead) -> tuple[Tensor, Tensor]:
    """The same by the papers' equations."""
    states, token_ids = sequence(published)
    tensors = published.tensors()
    embedding, output = published.target_weights()
    output = output[: published.vocab_size]
    ids = published.hot_tokens()
    if ids is not None:
        output = output[ids]
    output = tensors.get("lm_head.weight", output)
    if ids is not None:
        output = output[ids.argsort()]
    embedding = tensors.get("embed_tokens.weight", embedding)
    head = ReferenceEagle(published, tensors, embedding)
    outputs: list[Tensor] = []
    for position, token in enumerate(token_ids.tolist()):
        if position < LENGTH:
            parts = list(states[position].split(published.target_size))
            feature = head.feature(parts)
        else:
            feature = outputs[-1]
        outputs.append(head.read(feature, token, position))
    logits = [head.logits(out, output) for out in outputs]
    return torch.stack(outputs), torch.stack(logits)


@pytest.mark.parametrize("name", HEADS)
def test_papers_equations(name: str, tmp_path: Path) -> None:
    """Red when a weight, norm, residual, position or token of any form is mistaken."""
    head = loaded(HEADS[name], tmp_path).double()
    wanted = reference(HEADS[name])
    for chunks in ((LENGTH,), (1, 3, 2)):
        found = run(head, HEADS[name], chunks)
        for ours, theirs in zip(found, wanted, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", HEADS)
def test_written_heads_are_read_again(name: str, tmp_path: Path) -> None:
    """Red when what we train cannot be said in the published form, or is rounded."""
    head = loaded(HEADS[name], tmp_path / "theirs")
    save_head(head, tmp_path / "ours", torch.float32)
    again = shared(load_eagle_head(tmp_path / "ours", NUM_LAYERS), HEADS[name])
    assert again.config.model_copy(update={"verifier": head.config.verifier}) == (
        head.config
    )
    assert_same(head, again)
    # red when the config is none for transformers, and so for stock vLLM
    theirs = AutoConfig.from_pretrained(tmp_path / "ours")
    assert theirs.rope_parameters == head.config.rope
    assert theirs.head_dim == head.config.head_size


def assert_same(head: EagleHead, again: EagleHead) -> None:
    """Same tensors, bit for bit, shared ones too."""
    mine, other = dict(head.state_dict()), dict(again.state_dict())
    assert mine.keys() == other.keys()
    mine["shared"], other["shared"] = head.output.weight, again.output.weight
    for name, tensor in mine.items():
        assert tensor.dtype == other[name].dtype
        assert tensor.equal(other[name]), name


def test_written_form_is_that_of_vllm(tmp_path: Path) -> None:
    """Red when stock vLLM would not find what it looks for in a head of ours."""
    published = PublishedHead(draft_vocab_size=12, lm_head=False)
    save_head(loaded(published, tmp_path / "theirs"), tmp_path / "ours")
    config = json.loads((tmp_path / "ours" / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    assert config["draft_vocab_size"] == 12
    layer_ids = config["eagle_config"]["eagle_aux_hidden_state_layer_ids"]
    assert layer_ids == [2, 4, 5]
    keys = set(load_file(tmp_path / "ours" / "model.safetensors"))
    assert keys == {*published.tensors(), "lm_head.weight"}


def test_measured_accuracies_are_kept(tmp_path: Path) -> None:
    """Red when what training measured of a head does not reach its method."""
    measured = {"rank_accuracies": [[0.5, 0.2], [0.4, 0.1]], "depth": 3}
    folder = PublishedHead(keys={"treespec": measured}).write(tmp_path / "theirs")
    head = load_eagle_head(folder)
    assert head.config.rank_accuracies == ((0.5, 0.2), (0.4, 0.1))
    assert head.config.depth == 3
    save_head(head, tmp_path / "ours")
    config = read_head_config(tmp_path / "ours")
    assert config == head.config


@pytest.mark.parametrize(
    ("published", "layers"),
    [
        # SpecForge's numbers, and vLLM's
        (PublishedHead(layer_ids=(1, 3, 6)), (2, 4, 7)),
        (PublishedHead(layer_ids=(2, 3, 6)), (2, 3, 6)),
        (PublishedHead("speculators", layer_ids=(1, 3, 6)), (1, 3, 6)),
        (
            PublishedHead(
                layer_ids=None, keys={"eagle_aux_hidden_state_layer_ids": [1, 3, 6]}
            ),
            (1, 3, 6),
        ),
        (PublishedHead(layer_ids=None), (2, 4, 5)),
        (PublishedHead(keys={"eagle_config": None}), (2, 4, 5)),
        (PublishedHead("eagle"), (-1,)),
    ],
)
def test_layers_of_the_target(
    published: PublishedHead,
    layers: tuple[int, ...],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Red when a head reads other layers than it was trained on."""
    folder = published.write(tmp_path)
    with caplog.at_level(logging.INFO, logger="vllm_treespec.heads.published"):
        config = read_head_config(folder, NUM_LAYERS)
    assert isinstance(config, EagleHeadConfig)
    assert config.target_layers == layers
    assert ("SpecForge" in caplog.text) == (layers == (2, 4, 7))


def test_defaults_differ_by_form(tmp_path: Path) -> None:
    """Red when a missing norm_before_residual is taken for the other form's."""
    keys = {"norm_before_residual": None}
    theirs = PublishedHead("speculators", keys=keys).write(tmp_path / "speculators")
    usual = PublishedHead(keys=keys).write(tmp_path / "usual")
    config = read_head_config(theirs)
    assert isinstance(config, EagleHeadConfig)
    assert config.norm_before_residual
    config = read_head_config(usual)
    assert isinstance(config, EagleHeadConfig)
    assert not config.norm_before_residual


def test_weights_in_parts(tmp_path: Path) -> None:
    """Red when a head of several files is read in part, or refused."""
    published = HEADS["eagle3"]
    whole = load_eagle_head(published.write(tmp_path / "whole"))
    folder = published.write(tmp_path / "parts")
    (folder / "model.safetensors").unlink()
    parts: dict[str, dict[str, Tensor]] = {"a.safetensors": {}, "b.safetensors": {}}
    for number, (name, tensor) in enumerate(published.tensors().items()):
        parts[sorted(parts)[number % 2]][name] = tensor
    for file, tensors in parts.items():
        save_file(tensors, folder / file)
    index = {name: file for file, tensors in parts.items() for name in tensors}
    (folder / INDEX).write_text(json.dumps({"weight_map": index}))
    assert_same(whole, load_eagle_head(folder))


def test_other_numbers_of_layers(tmp_path: Path) -> None:
    """Red when num_hidden_layers, which may be the target's, is believed."""
    folder = PublishedHead(keys={"num_hidden_layers": 36}).write(tmp_path)
    assert load_eagle_head(folder).config.num_layers == 1


def test_copies_of_the_targets_weights_are_dropped(tmp_path: Path) -> None:
    """Red when a saved copy of the target's embedding takes memory a second time."""
    published = PublishedHead("eagle", embed_tokens=True)
    folder = published.write(tmp_path)
    tensors = published.tensors()
    embedding, output = (
        torch.nn.functional.pad(tensors[name], (0, 0, 0, 3))
        for name in ("embed_tokens.weight", "lm_head.weight")
    )
    head = load_eagle_head(folder)
    assert not head.config.share_embedding
    head.share(embedding, output)
    assert head.embedding.weight.data_ptr() == embedding.data_ptr()
    assert head.output.weight.data_ptr() == output.data_ptr()
    assert head.config.share_embedding
    assert head.config.share_output
    other = load_eagle_head(folder)
    other.share(embedding + 1, output + 1)
    assert other.embedding.weight.equal(tensors["embed_tokens.weight"])
    assert other.output.weight.equal(tensors["lm_head.weight"])


@pytest.mark.parametrize("lm_head", [True, False])
def test_hot_tokens(lm_head: bool, tmp_path: Path) -> None:
    """Red when another row drafts a hot token, of the target's layer or our own."""
    published = PublishedHead("eagle", lm_head=lm_head)
    folder = published.write(tmp_path / "head")
    file = tmp_path / "hot.json"
    file.write_text("[7, 3, 39, 3]")
    hot = [3, 7, 39]
    whole = loaded(published, folder)
    head = load_eagle_head(folder, hot_tokens=file)
    shared(head, published)
    assert head.config.draft_vocab_size == 3
    assert head.hot_token_ids is not None
    assert head.hot_token_ids.tolist() == hot
    features = torch.randn(2, published.hidden_size)
    torch.testing.assert_close(head.logits(features), whole.logits(features)[:, hot])
    save_head(head, tmp_path / "again", torch.float32)
    assert_same(head, shared(load_eagle_head(tmp_path / "again"), published))


def test_angles_stay_exact(tmp_path: Path) -> None:
    """Red when a head in bfloat16 turns queries by angles in bfloat16."""
    head = load_eagle_head(PublishedHead().write(tmp_path)).to(torch.bfloat16)
    assert head.rotary.cos.dtype == torch.float32
    assert head.norm.weight.dtype == torch.bfloat16
