"""Room for fork blocks in the KV cache, and what one group of layers costs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheSpec,
    SlidingWindowSpec,
)


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
