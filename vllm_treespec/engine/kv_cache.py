"""Groups of layers in the KV cache, room for fork blocks, and what one group costs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

if TYPE_CHECKING:
    from vllm.config import VllmConfig

try:
    from vllm.v1.core.kv_cache_config_builder import (  # type: ignore[import-not-found]
        get_kv_cache_config_builder,
    )
except ModuleNotFoundError:  # vLLM 0.32
    from vllm.v1.core.kv_cache_utils import get_kv_cache_groups
else:

    def get_kv_cache_groups(
        vllm_config: VllmConfig, kv_cache_spec: dict[str, KVCacheSpec]
    ) -> list[KVCacheGroupSpec]:
        """Groups that vLLM makes of a worker's layers."""
        builder = get_kv_cache_config_builder(vllm_config)
        return builder.get_kv_cache_groups(vllm_config, kv_cache_spec)


REMEDY = "pass --disable-hybrid-kv-cache-manager, or remove speculative_config"


def bytes_by_group(
    vllm_config: VllmConfig, specs: Mapping[str, KVCacheSpec]
) -> list[int]:
    """Bytes of one block of each KV cache group that vLLM makes of the layers.

    A block of the pool is as large as the largest of them.

    Args:
        vllm_config: the engine's.
        specs: of all layers, by name.

    Raises:
        ValueError: see ``check_groups``.

    """
    if vllm_config.scheduler_config.disable_hybrid_kv_cache_manager:
        return [sum(spec.page_size_bytes for spec in specs.values())]
    groups = get_kv_cache_groups(vllm_config, dict(specs))
    check_groups(groups)
    return [
        group.kv_cache_spec.page_size_bytes
        if isinstance(group.kv_cache_spec, UniformTypeKVCacheSpecs)
        else group.kv_cache_spec.page_size_bytes * len(group.layer_names)
        for group in groups
    ]


def check_groups(groups: Sequence[KVCacheGroupSpec]) -> None:
    """Check that blocks have as many tokens in every group, for forks have.

    Raises:
        ValueError: they have not.

    """
    sizes = sorted({group.kv_cache_spec.block_size for group in groups})
    if len(sizes) > 1:
        raise ValueError(
            f"draft trees need KV blocks of as many tokens in every layer, vLLM gives "
            f"this model blocks of {sizes}, for its layers differ in heads; {REMEDY}"
        )


def own_group_first(groups: Sequence[KVCacheGroupSpec], own: set[str]) -> list[int]:
    """Numbers of the groups, first that of the layers ``own`` of draft sources.

    Raises:
        ValueError: these are in several groups.

    """
    holding = [n for n, group in enumerate(groups) if own & set(group.layer_names)]
    if len(holding) > 1:
        raise ValueError(
            f"layers of what drafts lie in {len(holding)} KV cache groups, which is "
            f"not supported yet; {REMEDY}"
        )
    return sorted(range(len(groups)), key=lambda number: number not in holding)


def with_fork_blocks(config: KVCacheConfig, num_fork_blocks: int) -> KVCacheConfig:
    """The same cache with more blocks behind those that the scheduler knows."""
    num_blocks = config.num_blocks + num_fork_blocks

    def grown(num_bytes: int) -> int:
        return num_bytes // config.num_blocks * num_blocks

    tensors = [
        replace(
            tensor,
            size=grown(tensor.size),
            **(
                {
                    "offset": grown(tensor.offset),
                    "layer_stride": grown(tensor.layer_stride),
                }
                if tensor.layer_stride > tensor.block_stride
                else {}
            ),
        )
        for tensor in config.kv_cache_tensors
    ]
    return replace(config, num_blocks=num_blocks, kv_cache_tensors=tensors)


def cost_of_one_group(specs: Mapping[str, KVCacheSpec], length: int) -> float:
    """How many times the KV memory a request takes because all layers keep all tokens.

    Without trees, layers with a window keep that window, if others see all tokens.

    Args:
        specs: of all layers, by name.
        length: of the request, in tokens.

    """
    windows = [
        (spec.page_size_bytes, spec.sliding_window)
        for spec in specs.values()
        if isinstance(spec, SlidingWindowSpec)
    ]
    full = [
        spec.page_size_bytes
        for spec in specs.values()
        if isinstance(spec, FullAttentionSpec)
    ]
    if not windows or not full:
        return 1.0
    alone = sum(full) * length + sum(s * min(w, length) for s, w in windows)
    return length * (sum(full) + sum(s for s, _ in windows)) / alone
