"""The ``config.json`` that is written beside a head, in its authors' words."""

from __future__ import annotations

from typing import Any

import torch

from vllm_treespec.heads.config import (
    DecoderHeadConfig,
    DFlashHeadConfig,
    EagleHeadConfig,
    HeadError,
)
from vllm_treespec.heads.published import SLIDING
from vllm_treespec.sources.base import FINAL_LAYER


def written_config(config: DecoderHeadConfig, dtype: torch.dtype) -> dict[str, Any]:
    """The ``config.json`` of a head.

    Raises:
        HeadError: no published form has words for such a head.

    """
    said = _decoder(config, dtype)
    if isinstance(config, DFlashHeadConfig):
        return said | _dflash(config)
    assert isinstance(config, EagleHeadConfig)
    layers = config.target_layers or ()
    if layers[:1] == (1,) or (FINAL_LAYER in layers and config.combines):
        raise HeadError(
            f"no published form says that a head reads the layers {list(layers)}; "
            f"train one whose first layer is 2 or more"
        )
    if config.version == 1:
        return said | {"bias": config.fuse_bias, "qkv_bias": config.qkv_bias}
    return said | _eagle_3(config)


def _decoder(config: DecoderHeadConfig, dtype: torch.dtype) -> dict[str, Any]:
    """What the forms say alike, in the words of transformers."""
    rope = dict(config.rope)
    theta = rope.pop("rope_theta")
    return {
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


def _eagle_3(config: EagleHeadConfig) -> dict[str, Any]:
    """What SafeAILab and vLLM say of EAGLE-3 alone."""
    section: dict[str, Any] = {"use_aux_hidden_state": config.combines}
    if config.combines:
        section["norm_before_fc"] = config.norm_before_combine
        if config.target_layers is not None:
            section["eagle_aux_hidden_state_layer_ids"] = config.target_layers
    qwen = {
        "architectures": ["Eagle3Qwen3ForCausalLM"],
        "model_type": "qwen3",
    }
    llama = {"architectures": ["LlamaForCausalLMEagle3"]}
    return (qwen if config.qk_norm else llama) | {
        "target_hidden_size": config.target_hidden_size,
        "attention_bias": config.qkv_bias,
        "norm_before_residual": config.norm_before_residual,
        "norm_output": config.norm_output,
        "fc_norm": config.norm_layers,
        "eagle_config": section,
    }


def _dflash(config: DFlashHeadConfig) -> dict[str, Any]:
    """What DeepSeek says of DSpark, and z-lab of DFlash and DFlash2."""
    if config.layers[0] == 0 or config.qkv_bias != config.o_bias:
        raise HeadError(
            f"no published form says that a head reads the layers "
            f"{list(config.layers)} with qkv_bias {config.qkv_bias} and o_bias "
            f"{config.o_bias}; train one whose first layer is 1 or more, with both "
            f"biases or none"
        )
    name = "DFlashDraftModel"
    if config.markov_rank:
        name = "Qwen3DSparkModel"
    elif config.selector_rank:
        name = "DFlash2DraftModel"
    layers = [layer - 1 for layer in config.layers]
    # null: as layer_types say, by default
    causal = config.causality[0] if len({*config.causality}) == 1 else None
    section = {
        "mask_token_id": config.mask_token_id,
        "target_layer_ids": layers,
        "causal": causal,
        "sample_from_anchor": config.sample_from_anchor,
        "input_embedding_scale": config.input_scale,
        "output_multiplier": config.output_scale,
        "final_logit_softcapping": config.output_softcap,
    }
    if config.selector_rank:
        section |= config.model_dump(include={"selector_rank", "selector_top_k"})
    if config.conv_kernel_size:
        section |= config.model_dump(include={"conv_kernel_size", "conv_group_size"})
    markov = {
        "markov_rank": config.markov_rank,
        "markov_head_type": "vanilla",
        "enable_confidence_head": False,
    }
    return {
        "architectures": [name],
        "model_type": "qwen3",
        "target_hidden_size": config.target_hidden_size,
        "attention_bias": config.qkv_bias,
        "is_causal": causal,
        "block_size": config.block_size,
        "mask_token_id": config.mask_token_id,
        "target_layer_ids": layers,
        "sample_from_anchor": config.sample_from_anchor,
        "dflash_config": section,
        **_windows(config),
        **(markov if config.markov_rank else {}),
    }


def _windows(config: DFlashHeadConfig) -> dict[str, Any]:
    """Which layers have a window, and of which size."""
    if config.causal and not all(config.causality):
        raise HeadError(
            "no published form says that layers with a sliding window see later rows "
            "of a block and others do not"
        )
    kinds = ["full_attention"] * config.num_layers
    for number in config.sliding_layers:
        kinds[number] = SLIDING
    return {
        "layer_types": kinds,
        "sliding_window": config.sliding_window,
        "use_sliding_window": config.sliding_window is not None,
    }
