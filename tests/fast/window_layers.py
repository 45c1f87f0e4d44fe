"""Layers of which some have a window, and the config of an engine that groups them."""

from __future__ import annotations

import copy
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheSpec,
    SlidingWindowSpec,
)

from tests.fast.small_engine import BLOCK_SIZE, engine_config

# as Gemma-3-1B: 7 groups of 4 layers, the last ones with 3
GEMMA = (*[100] * 5, None) * 4 + (100, 100)
# as GPT-OSS, and with the layer of a head: 2 groups
GPT_OSS = (100, None) * 6
WITH_HEAD = (*GPT_OSS, None)


def layers(*windows: int | None) -> dict[str, KVCacheSpec]:
    """Layers with such windows; None: without."""
    sizes: dict[str, Any] = {
        "block_size": BLOCK_SIZE,
        "num_kv_heads": 1,
        "head_size": 8,
        "dtype": torch.float32,
    }
    return {
        str(number): FullAttentionSpec(**sizes)
        if window is None
        else SlidingWindowSpec(**sizes, sliding_window=window)
        for number, window in enumerate(windows)
    }


def grouping_config(several_groups: bool = True) -> VllmConfig:
    """An engine's config, for layers in several groups or in one."""
    config = copy.copy(engine_config({"method": "suffix_tree"}))
    config.scheduler_config = copy.copy(config.scheduler_config)
    config.scheduler_config.disable_hybrid_kv_cache_manager = not several_groups
    config.cache_config = copy.copy(config.cache_config)
    config.cache_config.kv_cache_layout = "LBHNC"
    return config
