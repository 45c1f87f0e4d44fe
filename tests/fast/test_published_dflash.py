"""Published DFlash heads: what files say, what is refused, what is written."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.fast.tables import assert_says, rows
from tests.fast.test_dflash_head import HEADS, NUM_LAYERS, states_of
from tests.heads import write_head
from tests.published_dflash import PublishedDFlash
from vllm_treespec.heads import (
    DFlashHead,
    DFlashHeadConfig,
    HeadError,
    load_dflash_head,
    load_eagle_head,
    load_head,
    read_head_config,
    save_head,
)
from vllm_treespec.heads.files import check_head_weights

DSPARK = HEADS["dspark"]
WEIGHTS = "model.safetensors"


def read(published: PublishedDFlash, folder: Path) -> DFlashHeadConfig:
    """The configuration of a head."""
    config = read_head_config(published.write(folder), NUM_LAYERS)
    assert isinstance(config, DFlashHeadConfig)
    return config


def edit_config(folder: Path, **changes: Any) -> None:
    """Replace keys of a folder's config.json."""
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_what_a_config_says(tmp_path: Path) -> None:
    """Red when a form's key is read as another, or a default is another."""
    config = read(HEADS["speculators dspark"], tmp_path)
    assert config.layers == (2, 4, 5)
    assert config.num_hot_tokens == 9
    assert (config.num_levels, config.depth) == (4, 4)
    assert (config.sample_from_anchor, config.causal) == (True, False)
    assert config.verifier == ("LlamaForCausalLM",)
    assert config.share_embedding
    assert not config.share_output
    config = read(HEADS["dflash"], tmp_path)
    assert (config.num_levels, config.depth) == (3, 3)
    assert config.share_output
    assert config.rope["rope_theta"] == 500.0
    config = read(PublishedDFlash(rope={}), tmp_path)
    assert config.rope["rope_theta"] == 1e6
    assert read(HEADS["jetspec"], tmp_path).causal
    config = read(HEADS["dflash2, three taps, scales"], tmp_path)
    assert (config.block_size, config.output_softcap) == (4, 2.0)
    assert (config.input_scale, config.output_scale) == (1.5, 0.7)
    config = read(HEADS["speculators dflash, one causal window"], tmp_path)
    assert [config.window(number) for number in range(2)] == [None, 6]
    assert config.causality == (False, True)
    ours = {"treespec": {"depth": 2, "rank_accuracies": [[0.5]]}}
    config = read(PublishedDFlash(keys=ours), tmp_path)
    assert (config.depth, config.rank_accuracies) == (2, ((0.5,),))


@pytest.mark.parametrize(("num_layers", "layers"), [(1, (6,)), (3, (2, 5, 8))])
def test_layers_that_no_key_names(
    num_layers: int, layers: tuple[int, ...], tmp_path: Path
) -> None:
    """Red when they are other layers than DFlash's authors take, of ten."""
    published = PublishedDFlash(
        num_layers=num_layers,
        num_target_layers=10,
        # for the width of fc
        target_layer_ids=tuple(range(num_layers)),
    )
    folder = published.write(tmp_path)
    edit_config(folder, dflash_config={"mask_token_id": 39})
    config = read_head_config(folder, 10)
    assert isinstance(config, DFlashHeadConfig)
    assert config.layers == layers


# A form, and what it is made of.
REFUSED = rows("""
dflash {"keys": {"sliding_window": null}, "sliding_layers": [0]} => the layers [0] have
    a sliding window of unknown size; add 'sliding_window' and 'use_sliding_window'
    true, or 'swa_window_size'
dflash {"keys": {"use_sliding_window": false}, "sliding_layers": [1]} => the layers [1]
    have a sliding window of unknown size
dflash {"keys": {"layer_types": null, "use_sliding_window": true}} =>
    'use_sliding_window' does not say which layers have a sliding window; add
    'layer_types'
dflash {"keys": {"layer_types": ["full_attention"]}} => 'layer_types' ['full_attention']
    must name 2 layers of 'full_attention' or 'sliding_attention'; use another head
dflash {"keys": {"layer_types": ["full_attention", "chunked_attention"]}} =>
    'layer_types' ['full_attention', 'chunked_attention'] must name 2 layers
dflash {"sliding_layers": [0], "sliding_window": 4} => sliding_window 4 must be more
    than block_size 4
dflash {"keys": {"add_swa_attention_sink_bias": true}, "sliding_layers": [0]} => heads
    with 'add_swa_attention_sink_bias' True are not supported, only False
dflash {"keys": {"quantization_config": {"quant_method": "fp8"}}} => heads with
    'quantization_config' {'quant_method': 'fp8'} are not supported, only a head without
    it
dflash {"rope": {"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}} => rotary
    embeddings of type 'longrope'
dflash {"keys": {"architectures": ["DSpineDraftModel"]}} => heads of the architecture
    DSpineDraftModel are not supported; use one of DFlashDraftModel,
dflash {"keys": {"model_type": "deepseek_v4"}} => model_type: Input should be
speculators {"keys": {"speculators_model_type": "peagle"}} => 'peagle' are not
    supported; use one of type 'eagle3', 'dflash', 'dflash2' or 'dspark'
speculators {"keys": {"projector_type": "domino"}} => heads with 'projector_type'
    'domino' are not supported
dspark {"keys": {"markov_head_type": "rnn"}, "markov_rank": 2} => heads with
    'markov_head_type' 'rnn' are not supported, only 'vanilla'
dflash {"keys": {"markov_rank": 2}, "markov_rank": 2} => must say whether the root's row
    predicts; add 'sample_from_anchor'
dflash {"keys": {"num_target_layers": null}, "target_layer_ids": null} =>
    ('target_layer_ids' is missing)
dspark {"keys": {"mask_token_id": null}, "markov_rank": 2} => (mask_token_id: Field
    required)
dflash {"mask_token_id": 40} => mask_token_id 40 must be below vocab_size 40
dflash {"keys": {"target_hidden_size": 15}} => 'fc.weight' reads 48 numbers, which are
    not 3 hidden states of 15; correct 'target_layer_ids' or 'target_hidden_size'
dflash {"block_size": 1} => block_size must be 2 or more
dflash2 {"draft_vocab_size": 9, "selector_rank": 2, "selector_top_k": 3} => a candidate
    selector drafts the whole vocabulary, and 'draft_vocab_size' is 9
dflash2 {"keys": {"dflash_config": null, "conv_group_size": 5, "conv_kernel_size": 2,
    "mask_token_id": 1, "target_layer_ids": [1, 3, 4], "block_size": 4},
    "conv_kernel_size": 2, "conv_group_size": 4} => conv_group_size 5 must divide
    hidden_size 16
dflash {"target_layer_ids": [1, 3, 8]} => reads hidden states before the layers [2, 4,
    9], and the target has 8
dflash {"keys": {"draft_vocab_size": 9}} => the weights have no 'd2t'; get the whole
    head
""")


@pytest.mark.parametrize(("given", "says"), REFUSED)
def test_what_is_not_supported_is_refused(
    given: str, says: str, tmp_path: Path
) -> None:
    """Red when such a head is loaded, or the message does not name key and remedy."""
    form, made_of = given.split(" ", 1)
    made: dict[str, Any] = {"form": form, **json.loads(made_of)}
    folder = PublishedDFlash(**made).write(tmp_path)
    with pytest.raises(HeadError) as refused:
        load_dflash_head(folder, NUM_LAYERS)
    assert_says(refused.value, says)


def test_pickled_masks_are_refused(tmp_path: Path) -> None:
    """Red when a vector beside the weights is passed over, or unpickled."""
    folder = HEADS["dflash"].write(tmp_path)
    torch.save(torch.zeros(16), folder / "mask_embedding.pt")
    with pytest.raises(HeadError, match=r"write it into .* as the tensor 'mask_emb"):
        load_dflash_head(folder)


def test_what_serving_has_no_use_for_is_left(tmp_path: Path) -> None:
    """Red when speculators' copies of the target's weights make a head unknown."""
    folder = HEADS["speculators dflash"].write(tmp_path)
    tensors = load_file(folder / WEIGHTS)
    tensors |= {
        "verifier_norm.weight": torch.ones(16),
        "verifier_lm_head.weight": torch.ones(40, 16),
        "rotary_emb.inv_freq": torch.ones(3),
    }
    save_file(tensors, folder / WEIGHTS)
    load_dflash_head(folder)


def test_other_kinds_of_heads_are_refused(tmp_path: Path) -> None:
    """Red when a loader takes a head of another kind."""
    dflash = write_head(tmp_path / "dflash", "dflash")
    eagle = write_head(tmp_path / "eagle", "eagle")
    with pytest.raises(HeadError, match="holds an eagle head; name a dflash head, or"):
        load_dflash_head(eagle)
    with pytest.raises(HeadError, match="holds a dflash head; name an eagle head, or"):
        load_eagle_head(dflash)
    with pytest.raises(HeadError, match="name a redrafter head or a medusa head, or"):
        load_head(dflash)


@pytest.mark.parametrize("name", HEADS)
def test_heads_are_written_as_they_were_read(name: str, tmp_path: Path) -> None:
    """Red when a written head says, or computes, something else."""
    published = HEADS[name]
    head = load_dflash_head(published.write(tmp_path / "a"), NUM_LAYERS)
    head.share(*torch.zeros(2, 43, 16))
    size = save_head(head, tmp_path / "b", torch.float32)
    assert size > 0
    check_head_weights(tmp_path / "b")
    again = load_dflash_head(tmp_path / "b", NUM_LAYERS)
    loose = {"verifier", "share_embedding", "share_output"}
    assert again.config.model_dump(exclude=loose) == head.config.model_dump(
        exclude=loose
    )
    again.share(*torch.zeros(2, 43, 16))
    for found, wanted in zip(
        computed(again, published), computed(head, published), strict=True
    ):
        assert found.equal(wanted)


def computed(head: DFlashHead, published: PublishedDFlash) -> tuple[torch.Tensor, ...]:
    """States, and logits of two levels."""
    states = states_of(head.double(), published, 2)
    draft = head.begin(states, torch.tensor([1, 2, 3]))
    tokens = torch.tensor([[4], [5], [6]])
    return states, draft.root_logits(), draft.extend(tokens, torch.zeros_like(tokens))


def test_written_configs_are_dsparks(tmp_path: Path) -> None:
    """Red when vLLM's `dspark` would not find a key that it reads."""
    head = load_dflash_head(DSPARK.write(tmp_path / "a"), NUM_LAYERS)
    save_head(head, tmp_path / "b")
    said = json.loads((tmp_path / "b" / "config.json").read_text())
    assert said["architectures"] == ["Qwen3DSparkModel"]
    assert said["target_layer_ids"] == [1, 3, 4]
    assert (said["block_size"], said["markov_rank"], said["mask_token_id"]) == (
        4,
        3,
        39,
    )
    assert said["markov_head_type"] == "vanilla"
    assert not said["enable_confidence_head"]
    assert set(load_file(tmp_path / "b" / WEIGHTS)) == {
        name for name in DSPARK.shapes() if "confidence" not in name
    }


def test_heads_that_no_form_has_words_for(tmp_path: Path) -> None:
    """Red when a head is written that its file describes wrongly."""
    published = PublishedDFlash(qkv_bias=True)
    head = load_dflash_head(published.write(tmp_path / "a"), NUM_LAYERS)
    head.config = head.config.model_copy(update={"target_layers": (0, 4, 5)})
    with pytest.raises(HeadError, match="whose first layer is 1 or more"):
        save_head(head, tmp_path / "b")
    windows: dict[str, Any] = {"sliding_layers": (0,), "sliding_window": 6}
    windows |= {"causal": True, "target_layers": (1, 4, 5)}
    head.config = head.config.model_copy(update=windows)
    with pytest.raises(HeadError, match="see later rows of a block and others do not"):
        save_head(head, tmp_path / "b")
    assert not (tmp_path / "b").exists()
