"""Which classes of ours vLLM is given, by device and by vLLM's model runner."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, NamedTuple

from packaging.version import Version

from vllm_treespec.engine.v2.tiers import drafts_by_batch_size, tiers

# The first vLLM whose V2 runner the adapter is written for.
V2_SINCE = Version("0.33.0")


class Adapter(NamedTuple):
    """What runs our trees on one of vLLM's runners."""

    worker: str
    scheduler: str
    # from nodes of the largest tree to a stock spec-config that stands for ours
    carrier: Callable[[int], dict[str, Any]]
    # whether it schedules a step while the one before runs
    asynchronous: bool


def v1_carrier(max_nodes: int) -> dict[str, Any]:
    """A method whose class vLLM makes, and which proposes through its runner."""
    return {
        "method": "custom_class",
        "model": "vllm_treespec.engine.drafter.TreeDrafter",
        "num_speculative_tokens": max_nodes - 1,
    }


def v2_carrier(max_nodes: int) -> dict[str, Any]:
    """The one stock method without weights that V2 runs; it never draws a draft."""
    return {
        "method": "ngram_gpu",
        "prompt_lookup_min": 1,
        "prompt_lookup_max": 1,
        "num_speculative_tokens": tiers(max_nodes)[-1] - 1,
        "num_speculative_tokens_per_batch_size": drafts_by_batch_size(max_nodes),
    }


V1_SCHEDULER = "vllm_treespec.engine.scheduler.TreeScheduler"
CPU = Adapter(
    "vllm_treespec.engine.v1.cpu_worker.TreeCPUWorker", V1_SCHEDULER, v1_carrier, False
)
GPU_V1 = Adapter(
    "vllm_treespec.engine.v1.gpu_worker.TreeGPUWorker", V1_SCHEDULER, v1_carrier, False
)
GPU_V2 = Adapter(
    "vllm_treespec.engine.v2.gpu_worker.TreeGPUWorker",
    "vllm_treespec.engine.v2.scheduler.TreeAsyncScheduler",
    v2_carrier,
    True,
)


def choose_adapter(device: str) -> Adapter:
    """The adapter of a device, ``"cpu"`` or ``"cuda"``.

    On a GPU it is that of vLLM's V2 runner where VLLM_USE_V2_MODEL_RUNNER is 1.
    """
    if device == "cpu":
        return CPU
    import vllm

    wanted = os.environ.get("VLLM_USE_V2_MODEL_RUNNER") == "1"
    if wanted and Version(vllm.__version__) >= V2_SINCE:
        return GPU_V2
    return GPU_V1
