"""Arguments and models that draft trees do not support, with the remedy."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING

from vllm_treespec.config import SpecConfigError
from vllm_treespec.config.base import MethodConfig
from vllm_treespec.config.checks import (
    check_files,
    check_folder,
    check_head,
    check_hot_tokens,
    head_joins_groups,
)
from vllm_treespec.config.draft_checks import (
    check_attention,
    check_kv_cache,
    check_positions,
    check_shards,
    check_text_only,
)
from vllm_treespec.config.reading import A_MODEL, read_config
from vllm_treespec.config.vocabularies import check_vocabularies
from vllm_treespec.engine.adapters import choose_adapter
from vllm_treespec.heads.names import no_such_model

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig
    from vllm.engine.arg_utils import EngineArgs

# Our GPU workers put tree attention in its place.
GPU_ATTENTION = "TRITON_ATTN"
TREE_ATTENTION = "vllm_treespec.engine.tree_attention.TreeAttentionBackend"
KV_CACHE_DTYPES = {
    "cpu": ("auto", "bfloat16", "float16"),
    "cuda": ("auto", "bfloat16", "float16", "fp8", "fp8_e4m3", "fp8_e5m2"),
}


def refuse_missing(target: str) -> None:
    """Refuse a target that is no folder, before it is looked for at the hub.

    Raises:
        SpecConfigError: naming it and the remedy.

    """
    # vLLM also reads s3://bucket/model and, with GGUF, name:quantisation
    problem = None if ":" in target else no_such_model(target)
    if problem is not None:
        raise SpecConfigError(f"--model: {problem}; name {A_MODEL}")


def refuse_arguments(args: EngineArgs) -> str:
    """Refuse vLLM arguments under which draft trees were not tested.

    Returns:
        the device of this platform, ``"cpu"`` or ``"cuda"``.

    Raises:
        SpecConfigError: naming the first such argument and the remedy.
        SeamError: when this vLLM lacks a seam.

    """
    from vllm.config import AttentionConfig
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    device = check_platform()
    adapter = choose_adapter(device)
    untested = {
        "pipeline_parallel_size": args.pipeline_parallel_size > 1,
        "prefill_context_parallel_size": args.prefill_context_parallel_size > 1,
        "decode_context_parallel_size": args.decode_context_parallel_size > 1,
        "enable_dbo": args.enable_dbo,
        "kv_transfer_config": args.kv_transfer_config is not None,
        "ec_transfer_config": args.ec_transfer_config is not None,
        "kv_offloading_size": args.kv_offloading_size is not None,
        "async_scheduling": args.async_scheduling not in (None, adapter.asynchronous),
        "kv_cache_dtype": args.kv_cache_dtype not in KV_CACHE_DTYPES[device],
        "return_sampling_mask": args.return_sampling_mask,
        "watermark_config": args.watermark_config is not None,
        "aux_output_config": args.aux_output_config.enable_return_routed_experts,
        "enable_batch_sharded_sampling": bool(args.enable_batch_sharded_sampling),
        "kv_sharing_fast_prefill": args.kv_sharing_fast_prefill,
        "worker_cls": args.worker_cls not in ("auto", adapter.worker),
        "scheduler_cls": args.scheduler_cls not in (None, adapter.scheduler),
        "attention_backend": device == "cuda"
        and AttentionConfig.validate_backend_before(args.attention_backend)
        not in (None, AttentionBackendEnum[GPU_ATTENTION]),
        "attention_config": device == "cuda"
        and bool(
            args.attention_config.backend or args.attention_config.backend_per_kind
        ),
    }
    for name, asked in untested.items():
        if asked:
            raise SpecConfigError(
                f"draft trees do not support {name}={getattr(args, name)!r} yet; "
                f"leave it at its default, or remove speculative_config"
            )
    return device


def choose_groups(
    asked: bool | None, config: MethodConfig, vllm_config: VllmConfig
) -> None:
    """Let layers be in several KV cache groups where a head's layer joins them.

    Args:
        asked: what the user said for ``disable_hybrid_kv_cache_manager``.
        config: validated.
        vllm_config: made from stock arguments, for one group.

    Raises:
        SpecConfigError: the user asked for several groups, which cannot be.

    """
    if not config.needs_one_group or asked:
        return
    target = vllm_config.model_config
    kinds = target.hf_text_config.to_dict().get("layer_types") or ()
    heads = target.get_num_kv_heads(vllm_config.parallel_config)
    # vLLM keeps one group, too, where layers see chunks
    chunked = target.attention_chunk_size is not None
    if not chunked and head_joins_groups(
        config, kinds, (heads, target.get_head_size())
    ):
        vllm_config.scheduler_config.disable_hybrid_kv_cache_manager = False
    elif asked is False:
        raise SpecConfigError(
            f"method '{config.name}' does not support "
            f"disable_hybrid_kv_cache_manager=False here, for its drafter keeps KV in "
            f"layers of its own; leave it at its default, or remove speculative_config"
        )


def platform_device() -> str:
    """The device of this platform, ``"cpu"`` or ``"cuda"``.

    Raises:
        SpecConfigError: this is another platform.

    """
    from vllm.platforms import current_platform

    device = current_platform.device_name
    if device not in ("cpu", "cuda"):
        raise SpecConfigError(
            f"draft trees run on vLLM's CPU and CUDA platforms, this is "
            f"{device or 'none'}; remove speculative_config"
        )
    return device


def check_platform() -> str:
    """Check that draft trees run on this platform, with this vLLM.

    Returns:
        the device of this platform, ``"cpu"`` or ``"cuda"``.

    Raises:
        SpecConfigError: this is another platform.
        SeamError: when this vLLM lacks a seam.

    """
    from vllm_treespec.engine.seams import check_seams

    device = platform_device()
    check_seams(device)
    return device


def unsupported_features(target: ModelConfig, device: str) -> dict[str, bool]:
    """What draft trees do not support in a target, and whether it has it.

    Args:
        target: vLLM's config of it.
        device: ``"cpu"`` or ``"cuda"``, on which less is supported.

    """
    multimodal = target.multimodal_config
    return {
        # Stock vLLM reads images causally on a CPU. On a GPU our kernel would do so.
        "attention to later tokens of an image (on a GPU)": device == "cuda"
        and target.is_mm_prefix_lm,
        "pruning of videos (video_pruning_rate)": multimodal is not None
        and multimodal.is_multimodal_pruning_enabled(),
        "a hybrid or state-space model": target.is_hybrid or target.has_inner_state,
        "multi-head latent attention": target.use_mla,
        "an encoder-decoder model": target.is_encoder_decoder,
        "a pooling model": target.runner_type == "pooling",
        "chunked local attention (on a GPU)": device == "cuda"
        and target.attention_chunk_size is not None,
    }


def refuse_models(config: MethodConfig, vllm_config: VllmConfig, device: str) -> None:
    """Refuse targets, draft models and heads that draft trees cannot serve.

    Args:
        config: validated.
        vllm_config: made from stock arguments.
        device: ``"cpu"`` or ``"cuda"``.

    Raises:
        SpecConfigError: naming what is in the way and the remedy.

    """
    runner = "V2" if choose_adapter(device).asynchronous else "V1"
    if vllm_config.use_v2_model_runner != (runner == "V2"):
        raise SpecConfigError(
            f"draft trees run on vLLM's {runner} model runner here, and vLLM chose "
            "another; unset VLLM_USE_V2_MODEL_RUNNER, or remove speculative_config"
        )
    target = vllm_config.model_config
    if target.is_moe and vllm_config.parallel_config.data_parallel_size > 1:
        raise SpecConfigError(
            "draft trees do not support data_parallel_size above 1 for mixtures of "
            "experts yet, whose engines step together; run an engine for each "
            "replica, or remove speculative_config"
        )
    for problem in feature_problems(target, device):
        raise SpecConfigError(problem)
    cache_dtype = vllm_config.cache_config.cache_dtype
    if device == "cpu":
        check_kv_cache(target.model, target.hf_text_config, cache_dtype)
    num_ranks = vllm_config.parallel_config.tensor_parallel_size
    for error in drafter_problems(config, target, num_ranks, device, cache_dtype):
        raise error


def feature_problems(target: ModelConfig, device: str) -> list[str]:
    """Say what draft trees do not support in a target; nothing, if all of it."""
    return [
        f"draft trees do not support {what} yet ({target.model}); serve it without "
        f"speculative_config"
        for what, found in unsupported_features(target, device).items()
        if found
    ]


def drafter_problems(
    config: MethodConfig,
    target: ModelConfig,
    num_ranks: int,
    device: str,
    cache_dtype: str = "auto",
) -> Iterator[SpecConfigError]:
    """Find what is wrong with draft models and heads, or does not fit a target.

    Args:
        config: validated.
        target: the target's.
        num_ranks: tensor-parallel ranks.
        device: ``"cpu"`` or ``"cuda"``.
        cache_dtype: of the KV cache, as the user asked for it.

    Yields:
        Errors that name what is in the way and the remedy.

    """
    from vllm.transformers_utils.config import get_config

    trust, size = target.trust_remote_code, target.get_vocab_size()
    draft_sizes: dict[str, int] = {}
    readable = True
    for model in config.models:
        try:
            check_folder(model, config)
            draft = read_config(
                "speculative_config 'model'", model, get_config, trust_remote_code=trust
            )
        except SpecConfigError as error:
            readable = False
            yield error
            continue
        draft_sizes[model] = draft.get_text_config().vocab_size
        for check in (
            partial(check_files, model, config),
            partial(check_text_only, model, draft),
            partial(check_attention, model, draft, device),
            partial(check_kv_cache, model, draft, cache_dtype),
            partial(check_shards, model, draft, num_ranks),
            partial(check_positions, model, draft, target.max_model_len),
        ):
            yield from _problems(check)
    if readable:
        tokenizer = target.tokenizer
        yield from _problems(
            partial(check_vocabularies, draft_sizes, tokenizer, size, trust)
        )
    for problem in _problems(partial(check_head, config, target.hf_text_config)):
        readable = False
        yield problem
    if readable:
        shared = min([size, *draft_sizes.values()])
        yield from _problems(partial(check_hot_tokens, config, shared))


def _problems(check: Callable[[], None]) -> Iterator[SpecConfigError]:
    try:
        check()
    except SpecConfigError as error:
        yield error


def refuse_short_chunks(vllm_config: VllmConfig) -> None:
    """Refuse chunks of prompts that are shorter than a draft tree.

    vLLM cuts trees to them, too, but only while other requests run or wait, of which
    a worker knows nothing. So it could not tell which draws had room.

    Raises:
        SpecConfigError: naming the argument and the remedy.

    """
    assert vllm_config.speculative_config is not None
    threshold = vllm_config.scheduler_config.long_prefill_token_threshold
    num_nodes = 1 + vllm_config.speculative_config.num_speculative_tokens
    if 0 < threshold < num_nodes:
        raise SpecConfigError(
            f"long_prefill_token_threshold={threshold} would cut draft trees of "
            f"{num_nodes} tokens; leave it at 0, or pass {num_nodes} or more"
        )


def below_traceback(message: str) -> str:
    """Lay a message out so that it can be read below the traceback of a server."""
    lines = textwrap.wrap(
        message, width=88, break_long_words=False, break_on_hyphens=False
    )
    return "\n".join(["", "", *lines, ""])
