"""Which classes of ours vLLM is given, by device and by vLLM's model runner."""

from __future__ import annotations

import os
from typing import Any, NamedTuple

from packaging.version import Version

# The first vLLM whose V2 runner the adapter is written for.
V2_SINCE = Version("0.33.0")


class Adapter(NamedTuple):
    """What runs our trees on one of vLLM's runners."""

    worker: str
    scheduler: str
    # a stock spec-config that stands for ours, without its number of draft tokens
    carrier: dict[str, Any]
    # whether it schedules a step while the one before runs
    asynchronous: bool


V1_CARRIER = {
    "method": "custom_class",
    "model": "vllm_treespec.engine.drafter.TreeDrafter",
}
V1_SCHEDULER = "vllm_treespec.engine.scheduler.TreeScheduler"
CPU = Adapter(
    "vllm_treespec.engine.v1.cpu_worker.TreeCPUWorker", V1_SCHEDULER, V1_CARRIER, False
)
GPU_V1 = Adapter(
    "vllm_treespec.engine.v1.gpu_worker.TreeGPUWorker", V1_SCHEDULER, V1_CARRIER, False
)
# The one stock method without weights that V2 runs; its own drafts are never drawn.
GPU_V2 = Adapter(
    "vllm_treespec.engine.v2.gpu_worker.TreeGPUWorker",
    "vllm_treespec.engine.v2.scheduler.TreeAsyncScheduler",
    {"method": "ngram_gpu", "prompt_lookup_min": 1, "prompt_lookup_max": 1},
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
