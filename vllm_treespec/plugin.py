"""The ``vllm.general_plugins`` entry point: our methods in ``speculative_config``.

vLLM calls :func:`register` in each of its processes. It wraps one function, the step
that turns arguments into a config: there, ``{"method": "rsd_s", ...}`` is replaced by
stock arguments. Arguments that do not name one of our methods pass untouched.
"""

from __future__ import annotations

import copy
import functools
import os
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from vllm_treespec.config import (
    METHODS,
    RENAMED,
    SpecConfigError,
    names_our_method,
    parse_spec_config,
    read_spec_file,
    unknown_method,
)
from vllm_treespec.config.base import MethodConfig
from vllm_treespec.config.checks import (
    check_head,
    check_head_files,
    check_kv_cache,
    check_positions,
    check_shards,
    check_vocabulary,
    check_weights,
    layers_read,
    read_config,
)

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.engine.arg_utils import EngineArgs

DRAFTER = "vllm_treespec.engine.v1.drafter.TreeDrafter"
WORKERS = {
    "cpu": "vllm_treespec.engine.v1.cpu_worker.TreeCPUWorker",
    "cuda": "vllm_treespec.engine.v1.gpu_worker.TreeGPUWorker",
}
SCHEDULER = "vllm_treespec.engine.scheduler.TreeScheduler"
# Fork blocks are copies of partly filled blocks; small blocks keep them small.
CPU_BLOCK_SIZE = 32
# Our GPU worker puts tree attention in its place.
GPU_ATTENTION = "TRITON_ATTN"
KV_CACHE_DTYPES = {
    "cpu": ("auto", "bfloat16", "float16"),
    "cuda": ("auto", "bfloat16", "float16", "fp8", "fp8_e4m3", "fp8_e5m2"),
}


@functools.cache
def register() -> None:
    """Let ``EngineArgs.create_engine_config`` accept our methods; once a process."""
    from vllm.engine.arg_utils import EngineArgs

    from vllm_treespec.engine.seams import SeamError

    stock = EngineArgs.create_engine_config

    @functools.wraps(stock)
    def create_engine_config(self: EngineArgs, *args: Any, **kwargs: Any) -> VllmConfig:
        def make(arguments: EngineArgs) -> VllmConfig:
            return stock(arguments, *args, **kwargs)

        spec = self.speculative_config
        if not isinstance(spec, dict):
            return make(self)
        try:
            if names_our_method(spec):
                return with_trees(self, spec, make)
            return without_trees(spec, functools.partial(make, self))
        except (SpecConfigError, SeamError) as error:
            raise type(error)(below_traceback(str(error))) from None

    EngineArgs.create_engine_config = create_engine_config


def with_trees(
    args: EngineArgs, spec: dict[str, Any], make: Callable[[EngineArgs], VllmConfig]
) -> VllmConfig:
    """Put stock arguments in place of a spec-config of ours, and make the config.

    The caller's arguments stay as they are. vLLM changes arguments while it makes a
    config, also what they hold, so it gets a deep copy.
    """
    config = parse_spec_config(spec)
    check_head_files(config)
    device = refuse_arguments(args)
    expanded = copy.deepcopy(args)
    for name, value in stock_arguments(config, args.block_size, device).items():
        if name == "additional_config":
            value = {**expanded.additional_config, **value}
        setattr(expanded, name, value)
    vllm_config = make(expanded)
    refuse_models(config, vllm_config, device)
    # A target that hands out other hidden states is compiled to another graph: vLLM's
    # compile cache tells them apart by this.
    num_layers = vllm_config.model_config.get_total_num_hidden_layers()
    vllm_config.additional_config["treespec_layers"] = layers_read(config, num_layers)
    refuse_short_chunks(vllm_config)
    if vllm_config.parallel_config.distributed_executor_backend == "ray":
        check_ray_nodes_first(vllm_config)
    if not args.disable_log_stats:
        from vllm_treespec.metrics import show_counters

        show_counters(vllm_config)
    return vllm_config


def check_ray_nodes_first(vllm_config: VllmConfig) -> None:
    """Let the nodes be checked when the engine starts, before its workers do.

    Raises:
        SpecConfigError: this is vLLM's older Ray executor.

    """
    if os.environ.get("VLLM_USE_RAY_V2_EXECUTOR_BACKEND") == "0":
        raise SpecConfigError(
            "draft trees run on vLLM's second Ray executor; unset "
            "VLLM_USE_RAY_V2_EXECUTOR_BACKEND, or remove speculative_config"
        )
    from vllm_treespec.engine.ray_executor import CheckedRayExecutor

    vllm_config.parallel_config.distributed_executor_backend = CheckedRayExecutor


def without_trees(spec: dict[str, Any], make: Callable[[], VllmConfig]) -> VllmConfig:
    """Make the config; if vLLM refuses what was meant for us, name our methods."""
    try:
        return make()
    except ValidationError as error:
        if meant_for_us(spec, error):
            raise unknown_method(spec) from None
        raise


def below_traceback(message: str) -> str:
    """Lay a message out so that it can be read below the traceback of a server."""
    lines = textwrap.wrap(
        message, width=88, break_long_words=False, break_on_hyphens=False
    )
    return "\n".join(["", "", *lines, ""])


def meant_for_us(spec: dict[str, Any], error: ValidationError) -> bool:
    """Whether a spec-config that vLLM refused may have been written for our methods.

    That is one with an unknown method. Or it has keys of ours, and an old name of ours
    or no method at all.
    """
    if error.title != "SpeculativeConfig":
        return False
    refused = {str(problem["loc"][0]) for problem in error.errors() if problem["loc"]}
    if "method" in refused:
        return True
    ours = {key for method in METHODS.values() for key in method.model_fields}
    return bool(refused & ours) and spec.get("method") in (None, *RENAMED)


def stock_arguments(
    config: MethodConfig, block_size: int | None, device: str
) -> dict[str, Any]:
    """The stock vLLM arguments that a spec-config stands for.

    Args:
        config: validated.
        block_size: what the user asked for, None to leave it to us.
        device: ``"cpu"`` or ``"cuda"``.

    """
    arguments: dict[str, Any] = {
        "speculative_config": {
            "method": "custom_class",
            "model": DRAFTER,
            "num_speculative_tokens": max(
                tree.config.proposer().sizes.max_nodes - 1
                for tree in config.scheduled_trees()
            ),
        },
        "worker_cls": WORKERS[device],
        "scheduler_cls": SCHEDULER,
        "additional_config": {"treespec": config.model_dump(mode="json")},
        # all layers in one KV cache group, also those with a window
        "disable_hybrid_kv_cache_manager": True,
    }
    if device == "cuda":
        arguments["attention_backend"] = GPU_ATTENTION
    else:
        arguments["block_size"] = block_size or CPU_BLOCK_SIZE
    return arguments


def expand_file(
    spec_file: Path, target: str | None = None, device: str = "cpu"
) -> dict[str, Any]:
    """Read a spec-config from a JSON file and expand it, for ``treespec expand``.

    With a ``target``, its sizes are compared with the draft model's or head's, too.

    Raises:
        SpecConfigError: when the file holds no valid spec-config.

    """
    config = parse_spec_config(read_spec_file(spec_file))
    check_weights(config)
    check_head_files(config)
    arguments = stock_arguments(config, None, device)
    if target is None:
        return arguments
    from transformers import AutoConfig

    read = AutoConfig.from_pretrained
    target_config = read_config("--target", target, read)
    size = target_config.vocab_size
    for model in config.models:
        draft = read_config("speculative_config 'model'", model, read)
        check_vocabulary(model, size, draft.vocab_size)
    check_head(config, target_config)
    return {"model": target, **arguments}


def refuse_arguments(args: EngineArgs) -> str:
    """Refuse vLLM arguments under which draft trees were not tested.

    Returns:
        the device of this platform, ``"cpu"`` or ``"cuda"``.

    Raises:
        SpecConfigError: naming the first such argument and the remedy.
        SeamError: when this vLLM lacks a seam.

    """
    from vllm.config import AttentionConfig
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    from vllm_treespec.engine.seams import check_seams

    device = current_platform.device_name
    if device not in WORKERS:
        raise SpecConfigError(
            f"draft trees run on vLLM's CPU and CUDA platforms, this is {device}; "
            f"remove speculative_config"
        )
    check_seams(device)
    untested = {
        "pipeline_parallel_size": args.pipeline_parallel_size > 1,
        "data_parallel_size": args.data_parallel_size > 1,
        "prefill_context_parallel_size": args.prefill_context_parallel_size > 1,
        "decode_context_parallel_size": args.decode_context_parallel_size > 1,
        "enable_dbo": args.enable_dbo,
        "kv_transfer_config": args.kv_transfer_config is not None,
        "kv_offloading_size": args.kv_offloading_size is not None,
        "logits_processors": bool(args.logits_processors),
        "async_scheduling": bool(args.async_scheduling),
        "kv_cache_dtype": args.kv_cache_dtype not in KV_CACHE_DTYPES[device],
        "return_sampling_mask": args.return_sampling_mask,
        "enable_prompt_embeds": args.enable_prompt_embeds,
        "logprobs_mode": str(args.logprobs_mode).startswith("processed"),
        "worker_cls": args.worker_cls not in ("auto", WORKERS[device]),
        "scheduler_cls": args.scheduler_cls not in (None, SCHEDULER),
        "disable_hybrid_kv_cache_manager": args.disable_hybrid_kv_cache_manager
        is False,
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


def refuse_models(config: MethodConfig, vllm_config: VllmConfig, device: str) -> None:
    """Refuse targets, draft models and heads that draft trees cannot serve.

    Args:
        config: validated.
        vllm_config: made from stock arguments.
        device: ``"cpu"`` or ``"cuda"``.

    Raises:
        SpecConfigError: naming what is in the way and the remedy.

    """
    from vllm.transformers_utils.config import get_config

    if vllm_config.use_v2_model_runner:
        raise SpecConfigError(
            "draft trees run on vLLM's V1 model runner; unset "
            "VLLM_USE_V2_MODEL_RUNNER, or remove speculative_config"
        )
    target = vllm_config.model_config
    unsupported = {
        "a multimodal model": target.is_multimodal_model,
        "a hybrid or state-space model": target.is_hybrid or target.has_inner_state,
        "multi-head latent attention": target.use_mla,
        "an encoder-decoder model": target.is_encoder_decoder,
        "a pooling model": target.runner_type == "pooling",
        "chunked local attention": target.attention_chunk_size is not None,
        "position ids with several axes": target.uses_mrope,
    }
    for what, found in unsupported.items():
        if found:
            raise SpecConfigError(
                f"draft trees do not support {what} yet ({target.model}); "
                f"remove speculative_config"
            )
    cache_dtype = vllm_config.cache_config.cache_dtype
    if device == "cpu":
        check_kv_cache(target.model, target.hf_text_config, cache_dtype)
    check_weights(config)
    check_head(config, target.hf_text_config)
    for model in config.models:
        trust = target.trust_remote_code
        draft = read_config(
            "speculative_config 'model'", model, get_config, trust_remote_code=trust
        )
        check_kv_cache(model, draft, cache_dtype)
        check_vocabulary(model, target.get_vocab_size(), draft.vocab_size)
        check_shards(model, draft, vllm_config.parallel_config.tensor_parallel_size)
        check_positions(model, draft, target.max_model_len)


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
