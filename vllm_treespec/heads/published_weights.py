"""The tensors of published EAGLE heads, read into ``EagleHead`` and written."""

from __future__ import annotations

import json
import re
from collections.abc import Set
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from vllm_treespec.heads.checkpoint import WEIGHTS, Checkpoint
from vllm_treespec.heads.config import EagleHeadConfig, HeadError
from vllm_treespec.heads.eagle import EagleHead
from vllm_treespec.heads.published import FIRST_LAYER, MIDDLE_LAYER, plain_key
from vllm_treespec.heads.weights import (
    TensorHeader,
    first_misfit,
    first_not_finite,
    listed,
)
from vllm_treespec.sources.base import FINAL_LAYER

# Published names by ours, of both versions; several are rows one below the other.
NAMES = {
    "embedding.weight": ("embed_tokens.weight",),
    "output.weight": ("lm_head.weight",),
    r"layer_norms.(\d+).weight": ("fc_norm.{}.weight",),
    r"layers.(\d+).qkv_proj.(weight|bias)": (
        "layers.{}.self_attn.q_proj.{}",
        "layers.{}.self_attn.k_proj.{}",
        "layers.{}.self_attn.v_proj.{}",
    ),
    r"layers.(\d+).o_proj.weight": ("layers.{}.self_attn.o_proj.weight",),
    r"layers.(\d+).([qk])_norm.weight": ("layers.{}.self_attn.{}_norm.weight",),
    r"layers.(\d+).gate_up_proj.weight": (
        "layers.{}.mlp.gate_proj.weight",
        "layers.{}.mlp.up_proj.weight",
    ),
    r"layers.(\d+).down_proj.weight": ("layers.{}.mlp.down_proj.weight",),
    r"layers.(\d+).post_attention_norm.weight": (
        "layers.{}.post_attention_layernorm.weight",
    ),
    r"input_norms.(\d+).weight": ("layers.{}.input_layernorm.weight",),
}
NAMES_1 = NAMES | {
    r"fuse.(weight|bias)": ("fc.{}",),
    "embedding_norm.weight": ("embed_layernorm.weight",),
    "fused_norm.weight": ("hidden_layernorm.weight",),
    "norm.weight": ("lm_head_layernorm.weight",),
}
NAMES_3 = NAMES | {
    "combine.weight": ("fc.weight",),
    "combine_norm.weight": ("input_norm.weight",),
    "embedding_norm.weight": (f"{FIRST_LAYER}input_layernorm.weight",),
    "feature_norm.weight": (f"{FIRST_LAYER}hidden_norm.weight",),
    "norm.weight": ("norm.weight",),
}
# Derived from config.json, or read beside the table.
NOT_READ = re.compile(r"d2t|t2d|.*rotary_emb\.inv_freq")


def published_names(name: str, version: int) -> tuple[str, ...]:
    """The published names of one of ``EagleHead``'s tensors."""
    for pattern, names in (NAMES_1 if version == 1 else NAMES_3).items():
        if match := re.fullmatch(pattern, name):
            return tuple(published.format(*match.groups()) for published in names)
    raise KeyError(name)


def check_weights_fit(head: EagleHead, checkpoint: Checkpoint) -> None:
    """Check by their headers that weights are those of a head.

    Raises:
        HeadError: a tensor is missing, left over, of another shape, or no
            floating-point number.

    """
    config, folder = head.config, checkpoint.folder
    wanted: dict[str, TensorHeader] = {}
    for name, keys in _names(head).items():
        own = head.state_dict()[name]
        parts = own.split(_row_counts(config, len(keys)) or len(own))
        wanted |= dict(zip(keys, map(TensorHeader.of, parts), strict=True))
    found = {plain_key(key): key for key in checkpoint.headers}
    if config.version == 3 and not config.combines:
        # as vLLM: the combining layer of a head that combines nothing
        found.pop("fc.weight", None)
    lost = wanted.keys() - found.keys()
    left = {found[k] for k in found.keys() - wanted.keys() if not NOT_READ.fullmatch(k)}
    left |= _spelled_twice(checkpoint.headers.keys())
    if left or lost:
        raise HeadError(
            f"the weights in {folder} do not fit its config.json: "
            f"missing {listed(lost)}, not known {listed(left)}; "
            f"get the whole head, or one of a form that docs/drafters.md lists"
        )
    problem = first_misfit(
        {found[key]: header for key, header in wanted.items()}, checkpoint.headers
    )
    if problem:
        raise _unfit(folder, problem)


def _names(head: EagleHead) -> dict[str, tuple[str, ...]]:
    """The published names of each of a head's weights."""
    return {
        name: published_names(name, head.config.version)
        for name in head.state_dict()
        if name != "hot_token_ids"
    }


def _unfit(folder: Path, problem: str) -> HeadError:
    return HeadError(
        f"the weights in {folder} do not fit its config.json: {problem}; correct it, "
        f"or get the head again"
    )


def load_weights(head: EagleHead, folder: Path, published: dict[str, Tensor]) -> None:
    """Take the published tensors of a head that was made for them, in their dtypes.

    Args:
        head: made from the folder's config.json.
        folder: for messages.
        published: by published name; they passed ``check_weights_fit``.

    Raises:
        HeadError: a weight is NaN or infinite, or ids of tokens are not the target's.

    """
    names = _names(head)
    used = {key for keys in names.values() for key in keys}
    weights = {k: tensor for k, tensor in published.items() if plain_key(k) in used}
    if name := first_not_finite(weights):
        raise _unfit(folder, f"{name} holds NaN or infinity")
    read = {plain_key(key): tensor for key, tensor in published.items()}
    tensors = {name: _joined(read, keys) for name, keys in names.items()}
    if "d2t" in read:
        ids, order = _target_ids(read, head.config, folder).sort()
        if head.hot_token_ids is not None:
            tensors["hot_token_ids"] = ids
        if "output.weight" in tensors and not order.equal(torch.arange(len(order))):
            tensors["output.weight"] = tensors["output.weight"][order]
    head.load_state_dict(tensors, assign=True)


def _spelled_twice(keys: Set[str]) -> set[str]:
    """Tensors of ``layers.0.`` that ``midlayer.`` has, too."""
    return {
        key for key in keys if key.replace(FIRST_LAYER, MIDDLE_LAYER, 1) in keys - {key}
    }


def _joined(read: dict[str, Tensor], keys: tuple[str, ...]) -> Tensor:
    if len(keys) == 1:
        return read[keys[0]]
    return torch.cat([read[key] for key in keys])


def _target_ids(
    read: dict[str, Tensor], config: EagleHeadConfig, folder: Path
) -> Tensor:
    """The target's id of each row of the output layer, from its offsets ``d2t``."""
    for key in {"d2t", "t2d"} & read.keys():
        if read[key].ndim != 1 or read[key].is_floating_point():
            raise HeadError(
                f"{key!r} in {folder} is {read[key].dtype} {list(read[key].shape)}, no "
                f"list of whole numbers; get the head again"
            )
    ids = torch.arange(len(read["d2t"])) + read["d2t"].long()
    if not (ids.min() >= 0 and ids.max() < config.vocab_size):
        raise HeadError(
            f"'d2t' in {folder} leads to tokens {ids.min()} to {ids.max()}, and the "
            f"vocabulary has {config.vocab_size}; get the head again"
        )
    if len(ids.unique()) < len(ids):
        raise HeadError(f"'d2t' in {folder} names a token twice; get the head again")
    if "t2d" in read and not read["t2d"].nonzero()[:, 0].equal(ids.sort().values):
        raise HeadError(
            f"'t2d' in {folder} marks other tokens than 'd2t' names; get the head again"
        )
    return ids


def save_published(
    head: EagleHead, folder: Path, dtype: torch.dtype = torch.bfloat16
) -> float:
    """Write a head as SafeAILab publishes them; return its weights' size in MB.

    Stock vLLM serves what this writes of version 3 (``{"method": "eagle3"}``), and of
    version 1 without biases and hot tokens (``{"method": "eagle"}``). Weights that are
    the target's are left out, but for EAGLE-3's rows of a draft vocabulary.

    Raises:
        HeadError: the form has no words for such a head.

    """
    layers = head.config.target_layers or ()
    if layers[:1] == (1,) or (FINAL_LAYER in layers and head.config.combines):
        raise HeadError(
            f"no published form says that a head reads the layers {list(layers)}; "
            f"train one whose first layer is 2 or more"
        )
    folder.mkdir(parents=True, exist_ok=True)
    tensors: dict[str, Tensor] = {}
    for name, tensor in _written(head).items():
        names = published_names(name, head.config.version)
        sizes = _row_counts(head.config, len(names))
        for key, part in zip(names, tensor.split(sizes or len(tensor)), strict=True):
            # parts of one tensor must not share memory in a file
            tensors[key] = part.to(dtype).clone()
    if head.config.version == 3:
        tensors = {
            key.replace(FIRST_LAYER, MIDDLE_LAYER): tensor
            for key, tensor in tensors.items()
        }
    if head.hot_token_ids is not None:
        ids = head.hot_token_ids.cpu()
        tensors["d2t"] = ids - torch.arange(len(ids))
        tensors["t2d"] = torch.zeros(head.config.vocab_size, dtype=torch.bool)
        tensors["t2d"][ids] = True
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    text = json.dumps(published_config(head.config, dtype), indent=2)
    (folder / "config.json").write_text(text + "\n")
    return (folder / WEIGHTS).stat().st_size / 1e6


def _written(head: EagleHead) -> dict[str, Tensor]:
    """The tensors that are written, by our names."""
    tensors: dict[str, Tensor] = dict(head.state_dict())
    ids = tensors.pop("hot_token_ids", None)
    config = head.config
    if config.share_output and config.version == 3 and ids is not None:
        if len(head.output.weight) != len(ids):
            raise HeadError("the head's output layer is missing; call share() first")
        tensors["output.weight"] = head.output.weight
    return tensors


def _row_counts(config: EagleHeadConfig, num_parts: int) -> list[int]:
    """Rows of each part of a tensor that is published in parts; [] for one."""
    counts = [config.num_heads, config.num_kv_heads, config.num_kv_heads]
    return {
        1: [],
        2: [config.intermediate_size] * 2,
        3: [count * config.head_size for count in counts],
    }[num_parts]


def published_config(config: EagleHeadConfig, dtype: torch.dtype) -> dict[str, Any]:
    """The ``config.json`` of a head, in the words of SafeAILab and vLLM."""
    rope = dict(config.rope)
    theta = rope.pop("rope_theta")
    said: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_size,
        "hidden_act": "silu",
        "rms_norm_eps": config.norm_eps,
        "max_position_embeddings": config.max_positions,
        "rope_theta": theta,
        "rope_scaling": None if rope["rope_type"] == "default" else rope,
        "vocab_size": config.vocab_size,
        "draft_vocab_size": config.draft_vocab_size,
        "tie_word_embeddings": False,
        "torch_dtype": str(dtype).removeprefix("torch."),
        "treespec": {
            "depth": config.depth,
            "rank_accuracies": config.rank_accuracies,
        },
    }
    if config.version == 1:
        return said | {"bias": config.fuse_bias, "qkv_bias": config.qkv_bias}
    if config.qk_norm:
        said["architectures"] = ["Eagle3Qwen3ForCausalLM"]
        said["model_type"] = "qwen3"
    else:
        said["architectures"] = ["LlamaForCausalLMEagle3"]
    section: dict[str, Any] = {"use_aux_hidden_state": config.combines}
    if config.combines:
        section["norm_before_fc"] = config.norm_before_combine
        if config.target_layers is not None:
            section["eagle_aux_hidden_state_layer_ids"] = config.target_layers
    return said | {
        "target_hidden_size": config.target_hidden_size,
        "attention_bias": config.qkv_bias,
        "norm_before_residual": config.norm_before_residual,
        "norm_output": config.norm_output,
        "fc_norm": config.norm_layers,
        "eagle_config": section,
    }
