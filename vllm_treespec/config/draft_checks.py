"""Whether a draft model's configuration suits the engine that it drafts in."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_treespec.config import SpecConfigError
from vllm_treespec.config.checks import wrong_model

if TYPE_CHECKING:
    from transformers import PretrainedConfig


def check_text_only(model: str, draft: PretrainedConfig) -> None:
    """Check that a draft model reads text alone: images are shown to the target only.

    Raises:
        SpecConfigError: it takes images or the like.

    """
    if draft.get_text_config() is not draft:
        raise wrong_model(
            f"{model} is a multimodal model ({draft.model_type}); name a text model "
            f"with the target's vocabulary, or train one (treespec train draft)"
        )


def check_attention(model: str, draft: PretrainedConfig, device: str) -> None:
    """Check that trees of a draft model can be drafted on a device.

    Raises:
        SpecConfigError: its layers see one chunk of the context, on a GPU.

    """
    chunk = draft.to_dict().get("attention_chunk_size")
    if device == "cuda" and chunk is not None:
        raise wrong_model(
            f"draft trees do not support chunked local attention on a GPU yet "
            f"({model} has chunks of {chunk} tokens); name another draft model"
        )


def undivided_size(config: PretrainedConfig, num_ranks: int) -> str | None:
    """Name and number of a size that ranks cannot share evenly; None: they all can.

    Ranks beyond the number of key-value heads hold copies of them, as vLLM does it.
    """
    sizes = config.to_dict() | {"num_attention_heads": config.num_attention_heads}
    for name in ("num_attention_heads", "num_key_value_heads", "intermediate_size"):
        size = sizes.get(name) or num_ranks
        copied = name == "num_key_value_heads" and num_ranks % size == 0
        if size % num_ranks and not copied:
            return f"{name} {size}"
    return None


def check_target_shards(target: str, config: PretrainedConfig, num_ranks: int) -> None:
    """Check that tensor-parallel ranks can share a target's layers evenly.

    Raises:
        SpecConfigError: naming the size that does not divide.

    """
    if size := undivided_size(config, num_ranks):
        raise SpecConfigError(
            f"--tensor-parallel-size {num_ranks} does not divide {size} of {target}; "
            f"pass a number that does"
        )


def check_shards(model: str, draft: PretrainedConfig, num_ranks: int) -> None:
    """Check that tensor-parallel ranks can share a draft model's layers evenly.

    Raises:
        SpecConfigError: naming the size that does not divide.

    """
    if size := undivided_size(draft, num_ranks):
        raise wrong_model(
            f"{model} has {size}, which tensor_parallel_size={num_ranks} does not "
            f"divide; use a draft model of other sizes (treespec train draft --heads, "
            f"--intermediate-size), or another tensor_parallel_size"
        )


def check_positions(model: str, draft: PretrainedConfig, max_model_len: int) -> None:
    """Check that a draft model reads texts as long as the target's.

    Raises:
        SpecConfigError: naming both lengths.

    """
    if draft.max_position_embeddings < max_model_len:
        raise wrong_model(
            f"{model} reads at most {draft.max_position_embeddings} positions and "
            f"max_model_len is {max_model_len}; pass --max-model-len "
            f"{draft.max_position_embeddings} or less"
        )


def check_kv_cache(model: str, config: PretrainedConfig, cache_dtype: str) -> None:
    """Check that a quantised model leaves the KV cache as it is.

    Args:
        model: target or draft model.
        config: its own.
        cache_dtype: what the user asked for; with ``"auto"`` vLLM follows the model.

    Raises:
        SpecConfigError: naming the key in the model's config.json.

    """
    quantised = config.to_dict().get("quantization_config") or {}
    if cache_dtype == "auto" and quantised.get("kv_cache_scheme"):
        raise SpecConfigError(
            f"the config.json of {model} asks for a quantised KV cache "
            f"('kv_cache_scheme'), which draft trees do not support here yet; pass "
            f"--kv-cache-dtype bfloat16, or remove speculative_config"
        )
