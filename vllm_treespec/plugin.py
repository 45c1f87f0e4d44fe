"""The ``vllm.general_plugins`` entry point: our methods in ``speculative_config``.

vLLM calls :func:`register` in each of its processes. It wraps one function, the step
that turns arguments into a config: there, ``{"method": "rsd_s", ...}`` is replaced by
stock arguments. Arguments that do not name one of our methods pass untouched.
"""

from __future__ import annotations

import copy
import functools
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from vllm_treespec.config import (
    METHODS,
    RENAMED,
    SpecConfigError,
    names_our_method,
    parse_spec_config,
    read_spec,
    reference,
    unknown_method,
)
from vllm_treespec.config.base import MethodConfig
from vllm_treespec.config.checks import (
    check_head,
    check_head_files,
    check_hot_tokens,
    check_weights,
    layers_read,
)
from vllm_treespec.config.reading import read_config
from vllm_treespec.config.vocabularies import check_vocabularies
from vllm_treespec.engine.adapters import Adapter, choose_adapter
from vllm_treespec.engine.refusals import (
    GPU_ATTENTION,
    below_traceback,
    choose_groups,
    refuse_arguments,
    refuse_missing,
    refuse_models,
    refuse_short_chunks,
)

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.engine.arg_utils import EngineArgs

# Fork blocks are copies of partly filled blocks; small blocks keep them small.
CPU_BLOCK_SIZE = 32


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
    refuse_missing(args.model)
    device = refuse_arguments(args)
    expanded = copy.deepcopy(args)
    for name, value in stock_arguments(config, args.block_size, device).items():
        if name == "additional_config":
            value = {**expanded.additional_config, **value}
        setattr(expanded, name, value)
    vllm_config = make(expanded)
    refuse_models(config, vllm_config, device)
    choose_groups(args.disable_hybrid_kv_cache_manager, config, vllm_config)
    from vllm_treespec.engine.request_check import request_check, warn_of_min_p

    warn_of_min_p(vllm_config.model_config)
    custom = vllm_config.model_config.logits_processors or []
    vllm_config.model_config.logits_processors = [*custom, request_check(device)]
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
    config: MethodConfig,
    block_size: int | None,
    device: str,
    adapter: Adapter | None = None,
) -> dict[str, Any]:
    """The stock vLLM arguments that a spec-config stands for.

    Args:
        config: validated.
        block_size: what the user asked for, None to leave it to us.
        device: ``"cpu"`` or ``"cuda"``.
        adapter: to one of vLLM's runners; None: the device's.

    """
    adapter = adapter or choose_adapter(device)
    arguments: dict[str, Any] = {
        "speculative_config": adapter.carrier(
            max(t.config.proposer().sizes.max_nodes for t in config.scheduled_trees())
        ),
        "worker_cls": adapter.worker,
        "scheduler_cls": adapter.scheduler,
        "additional_config": {
            "treespec": {
                **config.model_dump(mode="json"),
                "method": reference(type(config)),
            }
        },
    }
    if config.needs_one_group:
        # all layers in one KV cache group, also those with a window
        arguments["disable_hybrid_kv_cache_manager"] = True
    if device == "cuda":
        arguments["attention_backend"] = GPU_ATTENTION
    else:
        arguments["block_size"] = block_size or CPU_BLOCK_SIZE
    return arguments


def expand(
    given: str, target: str | None = None, device: str = "cpu"
) -> dict[str, Any]:
    """Read a spec-config and expand it, for ``treespec expand``.

    With a ``target``, its sizes are compared with the draft model's or head's, too.

    Args:
        given: JSON text, or the name of a JSON file.
        target: folder or hub id.
        device: ``"cpu"`` or ``"cuda"``.

    Raises:
        SpecConfigError: it is no valid spec-config.

    """
    config = parse_spec_config(read_spec(given))
    check_weights(config)
    check_head_files(config)
    check_hot_tokens(config)
    arguments = stock_arguments(config, None, device)
    if target is None:
        return arguments
    from transformers import AutoConfig

    read = AutoConfig.from_pretrained
    target_config = read_config("--target", target, read).get_text_config()
    size = target_config.vocab_size
    draft_sizes = {
        model: read_config("speculative_config 'model'", model, read).vocab_size
        for model in config.models
    }
    check_vocabularies(draft_sizes, target, size, trust=False)
    check_head(config, target_config)
    check_hot_tokens(config, min([size, *draft_sizes.values()]))
    return {"model": target, **arguments}
