"""Whether draft models and heads fit their target, before any weight is loaded."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from huggingface_hub.errors import StrictDataclassError

from vllm_treespec.config import HEAD_METHODS, SpecConfigError
from vllm_treespec.config.base import MethodConfig
from vllm_treespec.config.hybrid import HEAD_KINDS, HybridConfig
from vllm_treespec.heads import (
    EagleHeadConfig,
    HeadError,
    LyannaHeadConfig,
    MedusaHeadConfig,
    head_folder,
    read_head_config,
)
from vllm_treespec.heads.files import check_head_weights, read_hot_tokens
from vllm_treespec.heads.published import is_eagle
from vllm_treespec.heads.weights import listed, tensor_headers, weights_problem

if TYPE_CHECKING:
    from transformers import PretrainedConfig

logger = logging.getLogger(__name__)

# What a draft model's config.json must say, with the names that it has there.
SIZES = {
    "vocab_size": ("vocab_size",),
    "num_hidden_layers": ("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
}
# What it may say, and not as 0.
POSITIVE = {
    *(name for names in SIZES.values() for name in names),
    *("hidden_size", "n_embd", "intermediate_size", "max_position_embeddings"),
    *("num_attention_heads", "n_head", "num_key_value_heads", "head_dim"),
}


def check_weights(config: MethodConfig) -> None:
    """Check that draft models given as folders are complete.

    Raises:
        SpecConfigError: naming the file that is missing or broken.

    """
    for model in config.models:
        folder = Path(model)
        if not folder.exists():
            if folder.is_absolute() or model.startswith((".", "~")):
                raise SpecConfigError(
                    f"speculative_config 'model': there is no folder {model}; "
                    f"`treespec assets` prints where the shipped draft models lie"
                )
            continue
        if not (folder / "config.json").is_file():
            raise SpecConfigError(
                f"speculative_config 'model': {folder} holds no config.json; name the "
                f"folder of a model in Hugging Face format"
            )
        said = _check_config_file(folder / "config.json", config)
        # older formats say it in a file of their own
        quantised = {"quantization_config", "compression_config"} & said.keys() or any(
            folder.glob("*quant*.json")
        )
        files = sorted(folder.glob("*.safetensors"))
        if not files:
            raise SpecConfigError(
                f"speculative_config 'model': {folder} holds no *.safetensors weights; "
                f"convert them with save_pretrained(..., safe_serialization=True)"
            )
        for problem in filter(None, map(weights_problem, files)):
            raise SpecConfigError(
                f"speculative_config 'model': {problem}; copy or save the draft model "
                f"again"
            )
        headers = {n: h for file in files for n, h in tensor_headers(file).items()}
        if is_eagle(headers):
            raise _no_draft_model(folder, "eagle", config)
        whole = [
            name
            for name, header in headers.items()
            if name.endswith(".weight") and not header.is_floating
        ]
        if whole and not quantised:
            raise SpecConfigError(
                f"speculative_config 'model': weights in {folder} are whole numbers "
                f"({listed(whole)}), and its config.json has no 'quantization_config'; "
                f"save the draft model again, `treespec shrink` makes one in int8"
            )


def _check_config_file(path: Path, method: MethodConfig) -> dict[str, Any]:
    """Read a config.json that is a model's, and says what a draft model's must."""
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise SpecConfigError(
            f"speculative_config 'model': {path} is not JSON ({error}); copy or save "
            f"the draft model again"
        ) from None
    if not isinstance(config, dict):
        raise SpecConfigError(
            f"speculative_config 'model': {path} holds no JSON object; name the folder "
            f"of a model in Hugging Face format"
        )
    kind = config.get("method")
    if isinstance(kind, str) and kind in HEAD_METHODS:
        raise _no_draft_model(path.parent, kind, method)
    if "speculators_model_type" in config:
        raise _no_draft_model(path.parent, "eagle", method)
    text = config.get("text_config")
    keys = {*config, *(text if isinstance(text, dict) else ())}
    for size, names in SIZES.items():
        if keys.isdisjoint(names):
            raise SpecConfigError(
                f"speculative_config 'model': {path} says no {size}; add it, or save "
                f"the draft model again with save_pretrained"
            )
    for key, size in {**config, **(text if isinstance(text, dict) else {})}.items():
        if key in POSITIVE and isinstance(size, int) and size < 1:
            raise SpecConfigError(
                f"speculative_config 'model': {path} says {key} {size}, which must be "
                f"1 or more; save the draft model again with save_pretrained"
            )
    return config


def _no_draft_model(folder: Path, kind: str, config: MethodConfig) -> SpecConfigError:
    return SpecConfigError(
        f"speculative_config 'model': {folder} holds {_a_head(kind)}, not a draft "
        f"model; write {_key_of_head(kind, config)}"
    )


def _key_of_head(kind: str, config: MethodConfig) -> str:
    """The key, with its value, with which a head of this kind is drafted from."""
    if isinstance(config, HybridConfig) and kind in HEAD_KINDS:
        return f"'drafter' '{kind}'"
    return f"method '{HEAD_METHODS[kind]}'"


def check_head_files(config: MethodConfig) -> None:
    """Check that the folder of a head is complete, and of the method's kind.

    Raises:
        SpecConfigError: naming the file that is missing or broken.

    """
    if config.head is None:
        return
    try:
        _check_head_folder(head_folder(config.head), config)
        # a Medusa head's accuracies must give a tree
        config.proposer()
    except ValueError as error:
        raise SpecConfigError(f"speculative_config 'model': {error}") from None


def _check_head_folder(folder: Path, config: MethodConfig) -> None:
    """Check a head's folder.

    Raises:
        HeadError: naming the file that is missing or broken.

    """
    head = read_head_config(folder)
    if head.method != config.head_kind:
        raise HeadError(
            f"{folder} holds {_a_head(head.method)}; write "
            f"{_key_of_head(head.method, config)}, or name the folder of "
            f"{_a_head(str(config.head_kind))}"
        )
    check_head_weights(folder)
    levels = len(head.rank_accuracies) if isinstance(head, MedusaHeadConfig) else 0
    if levels > head.depth:
        raise HeadError(
            f"'rank_accuracies' in {folder}/config.json has {levels} levels and "
            f"there are {head.depth} heads; remove the last levels"
        )


def _a_head(kind: str) -> str:
    return f"{'an' if kind == 'eagle' else 'a'} {kind} head"


def read_config(
    what: str, model: str, read: Callable[..., PretrainedConfig], **options: Any
) -> PretrainedConfig:
    """Read the configuration of a model in Hugging Face format.

    Args:
        what: the key or option that names the model, for the message.
        model: folder or hub id.
        read: called with ``model`` and ``options``.

    Raises:
        SpecConfigError: naming the model and what is wrong with it.

    """
    try:
        return read(model, **options)
    except (
        OSError,
        ValueError,
        StrictDataclassError,
        RecursionError,
        ZeroDivisionError,
    ) as error:
        file = Path(model) / "config.json"
        where = str(file) if file.is_file() else f"the configuration of {model}"
        reason = " ".join(str(error).split())
        raise SpecConfigError(
            f"{what}: {where} cannot be read ({reason}); name the folder, or the hub "
            f"id, of a model in Hugging Face format"
        ) from None


def check_text_only(model: str, draft: PretrainedConfig) -> None:
    """Check that a draft model reads text alone: images are shown to the target only.

    Raises:
        SpecConfigError: it takes images or the like.

    """
    if draft.get_text_config() is not draft:
        raise SpecConfigError(
            f"speculative_config 'model': {model} is a multimodal model "
            f"({draft.model_type}); name a text model with the target's vocabulary, or "
            f"train one (treespec train draft)"
        )


def check_attention(model: str, draft: PretrainedConfig, device: str) -> None:
    """Check that trees of a draft model can be drafted on a device.

    Raises:
        SpecConfigError: its layers see one chunk of the context, on a GPU.

    """
    chunk = draft.to_dict().get("attention_chunk_size")
    if device == "cuda" and chunk is not None:
        raise SpecConfigError(
            f"speculative_config 'model': draft trees do not support chunked local "
            f"attention on a GPU yet ({model} has chunks of {chunk} tokens); name "
            f"another draft model"
        )


def check_hot_tokens(config: MethodConfig, vocab_size: int) -> None:
    """Check the lists of hot tokens of draft models.

    Raises:
        SpecConfigError: one cannot be read.

    """
    try:
        for file in config.hot_token_files:
            if file is not None:
                read_hot_tokens(file, vocab_size)
    except HeadError as error:
        raise SpecConfigError(f"speculative_config {error}") from None


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


def check_shards(model: str, draft: PretrainedConfig, num_ranks: int) -> None:
    """Check that tensor-parallel ranks can share a draft model's layers evenly.

    Raises:
        SpecConfigError: naming the size that does not divide.

    """
    if size := undivided_size(draft, num_ranks):
        raise SpecConfigError(
            f"speculative_config 'model': {model} has {size}, which "
            f"tensor_parallel_size={num_ranks} does not divide; use a draft model "
            f"of other sizes (treespec train draft --heads, --intermediate-size), "
            f"or another tensor_parallel_size"
        )


def check_positions(model: str, draft: PretrainedConfig, max_model_len: int) -> None:
    """Check that a draft model reads texts as long as the target's.

    Raises:
        SpecConfigError: naming both lengths.

    """
    if draft.max_position_embeddings < max_model_len:
        raise SpecConfigError(
            f"speculative_config 'model': {model} reads at most "
            f"{draft.max_position_embeddings} positions and max_model_len is "
            f"{max_model_len}; pass --max-model-len "
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


def check_head(config: MethodConfig, target: PretrainedConfig) -> None:
    """Check that a head was made for a target like this one.

    Raises:
        SpecConfigError: naming what differs.

    """
    if config.head is None:
        return
    head = read_head_config(config.head)
    sizes = {"vocab_size": (head.vocab_size, target.vocab_size)}
    if isinstance(head, EagleHeadConfig):
        states = (head.target_hidden_size, target.hidden_size)
        sizes["target_hidden_size"] = states
    if not isinstance(head, EagleHeadConfig) or (
        head.share_embedding or head.share_output
    ):
        sizes["hidden_size"] = (head.hidden_size, target.hidden_size)
    for name, (found, wanted) in sizes.items():
        if found != wanted:
            raise SpecConfigError(
                f"speculative_config 'model': the head {config.head} has {name} "
                f"{found}, the target {wanted}; use a head trained for this target"
                f" (treespec train {head.method})"
            )
    embedding_size = target.to_dict().get("word_embed_proj_dim", target.hidden_size)
    if embedding_size != target.hidden_size:
        raise SpecConfigError(
            f"heads do not support targets whose embeddings ({embedding_size}) and "
            f"hidden states ({target.hidden_size}) differ in size yet; remove "
            f"speculative_config"
        )
    if isinstance(head, EagleHeadConfig):
        _check_target_layers(config.head, head, target)


def layers_read(config: MethodConfig, num_target_layers: int) -> list[int]:
    """Before which layers of the target the method's head reads hidden states."""
    head = None if config.head is None else read_head_config(config.head)
    if not isinstance(head, EagleHeadConfig):
        return []
    return list(head.with_target(num_target_layers).layers)


def head_joins_groups(
    config: MethodConfig, layer_types: Collection[str], kv_heads: tuple[int, int]
) -> bool:
    """Whether a head's layer is one more of the target's layers that see all tokens.

    Then vLLM groups it with them. Other layers would get groups of one layer each.

    Args:
        config: validated.
        layer_types: of the target, as in its config.json.
        kv_heads: key-value heads of each layer of it on one rank, and their size.

    """
    if config.models or config.head is None:
        return False
    head = read_head_config(config.head)
    if isinstance(head, LyannaHeadConfig) and not head.context:
        return True
    return (
        isinstance(head, EagleHeadConfig)
        and head.num_layers == 1
        and (head.num_kv_heads, head.head_size) == kv_heads
        and {"full_attention", "sliding_attention"} <= set(layer_types)
    )


def _check_target_layers(
    name: str, head: EagleHeadConfig, target: PretrainedConfig
) -> None:
    """Check the layers that an EAGLE head reads, and warn of another architecture."""
    try:
        head.with_target(target.num_hidden_layers)
    except HeadError as error:
        raise SpecConfigError(f"speculative_config 'model': {name}: {error}") from None
    found = target.architectures or ()
    if head.verifier and found and not set(found) & set(head.verifier):
        logger.warning(
            "The head %s was trained for a %s, and the target is a %s",
            name,
            ", ".join(head.verifier),
            ", ".join(found),
        )
