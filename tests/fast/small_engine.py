"""Real vLLM objects of a model without weights: config, requests, scheduler."""

from __future__ import annotations

import copy
import functools
import json
import tempfile
import time
from collections.abc import Mapping
from typing import Any

import torch
from transformers import PretrainedConfig
from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import SamplingParams, StructuredOutputsParams
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
)
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from tests.heads import llama
from vllm_treespec.config import parse_spec_config
from vllm_treespec.engine.scheduler import TreeScheduler
from vllm_treespec.plugin import stock_arguments

MODEL_NAME = "smol"
BLOCK_SIZE, NUM_BLOCKS, PROMPT_LEN = 16, 64, 4
KV_CACHE_SPEC = FullAttentionSpec(
    block_size=BLOCK_SIZE, num_kv_heads=2, head_size=64, dtype=torch.float32
)


def model_config() -> PretrainedConfig:
    """Configuration of a target of one layer."""
    sizes = {"num_hidden_layers": 1, "num_attention_heads": 4}
    return llama(hidden_size=256, max_position_embeddings=64, **sizes)


@functools.cache
def _made_once(spec: str) -> VllmConfig:
    with tempfile.TemporaryDirectory() as folder:
        model_config().save_pretrained(folder)
        config = EngineArgs(
            model=folder,
            served_model_name=MODEL_NAME,
            skip_tokenizer_init=True,
            max_model_len=64,
            max_num_seqs=4,
            max_num_batched_tokens=64,
            **stock_arguments(parse_spec_config(json.loads(spec)), BLOCK_SIZE, "cpu"),
        ).create_engine_config()
    config.cache_config.num_gpu_blocks = NUM_BLOCKS
    return config


def engine_config(spec: Mapping[str, Any]) -> VllmConfig:
    """The config of a new engine with this spec-config."""
    config = copy.copy(_made_once(json.dumps(spec)))
    config.instance_id = str(time.time_ns())
    config.parallel_config = copy.copy(config.parallel_config)
    return config


def make_scheduler(
    config: VllmConfig,
    log_stats: bool = False,
    manager: StructuredOutputManager | None = None,
) -> TreeScheduler:
    """Our scheduler, without requests."""
    return TreeScheduler(
        vllm_config=config,
        kv_cache_config=KVCacheConfig(
            num_blocks=NUM_BLOCKS,
            kv_cache_tensors=[],
            kv_cache_groups=[KVCacheGroupSpec(["layer"], KV_CACHE_SPEC)],
        ),
        structured_output_manager=manager or StructuredOutputManager(config),
        block_size=BLOCK_SIZE,
        log_stats=log_stats,
    )


def make_request(req_id: str, regex: str | None = None, **params: Any) -> Request:
    """A request of ``PROMPT_LEN`` prompt tokens, with a grammar or without."""
    if regex is not None:
        params["structured_outputs"] = StructuredOutputsParams(regex=regex)
    return Request(
        request_id=req_id,
        prompt_token_ids=[1] * PROMPT_LEN,
        sampling_params=SamplingParams(max_tokens=32, **params),
        pooling_params=None,
    )
