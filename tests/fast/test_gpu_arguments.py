"""What a spec-config becomes on a GPU, and what is refused there."""

from typing import Any

import pytest
from vllm.config import AttentionConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.platforms import current_platform
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from vllm_treespec.config import SpecConfigError, parse_spec_config
from vllm_treespec.engine.refusals import refuse_arguments
from vllm_treespec.plugin import stock_arguments

SPEC = {"method": "suffix_tree", "num_drafts": 8, "depth": 4, "schedule": "fixed"}


@pytest.fixture
def on(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that makes vLLM believe in another platform."""

    def make(device_name: str) -> None:
        monkeypatch.setattr(current_platform, "device_name", device_name)

    return make


def test_stock_arguments() -> None:
    """Red when a GPU gets the CPU's worker or blocks, or other attention."""
    config = parse_spec_config(SPEC)
    cpu = stock_arguments(config, None, "cpu")
    gpu = stock_arguments(config, None, "cuda")
    assert cpu["worker_cls"].endswith("TreeCPUWorker")
    assert gpu["worker_cls"].endswith("TreeGPUWorker")
    assert gpu["attention_backend"] == "TRITON_ATTN"
    assert "block_size" not in gpu
    assert "attention_backend" not in cpu
    for name in ("speculative_config", "scheduler_cls", "additional_config"):
        assert cpu[name] == gpu[name]


def test_default_arguments_pass(on: Any) -> None:
    """Red when a GPU is refused, or its device is not told to the expansion."""
    on("cuda")
    assert refuse_arguments(EngineArgs(model="some/model")) == "cuda"
    for backend in (AttentionBackendEnum.TRITON_ATTN, "TRITON_ATTN", "auto"):
        args = EngineArgs(model="some/model", attention_backend=backend)
        assert refuse_arguments(args) == "cuda"
    args = EngineArgs(model="some/model", kv_cache_dtype="fp8")
    assert refuse_arguments(args) == "cuda"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("attention_backend", AttentionBackendEnum.FLASH_ATTN),
        ("attention_backend", "FLASH_ATTN"),
        ("attention_config", AttentionConfig(backend=AttentionBackendEnum.FLASH_ATTN)),
        ("kv_cache_dtype", "fp8_per_token_head"),
        ("pipeline_parallel_size", 2),
        ("async_scheduling", True),
    ],
)
def test_what_a_gpu_refuses(on: Any, name: str, value: Any) -> None:
    """Red when something untested on a GPU is taken, or the message names no key."""
    on("cuda")
    with pytest.raises(SpecConfigError, match=f"{name}="):
        refuse_arguments(EngineArgs(model="some/model", **{name: value}))


def test_fp8_cache_is_for_gpus(on: Any) -> None:
    """Red when a CPU takes an fp8 KV cache."""
    on("cpu")
    with pytest.raises(SpecConfigError, match="kv_cache_dtype="):
        refuse_arguments(EngineArgs(model="some/model", kv_cache_dtype="fp8"))


def test_other_platforms_are_refused(on: Any) -> None:
    """Red when a platform is taken that nothing was written for."""
    on("rocm")
    with pytest.raises(SpecConfigError, match="this is rocm"):
        refuse_arguments(EngineArgs(model="some/model"))
