"""Room for fork blocks in the KV cache."""

from __future__ import annotations

from dataclasses import replace

from vllm.v1.kv_cache_interface import KVCacheConfig


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
