"""vLLM's GPU worker without a GPU, and so every worker that inherits from it."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

from vllm.utils.torch_utils import set_random_seed
from vllm.v1.worker import gpu_worker

from vllm_treespec.kernels import workspace


def install() -> None:
    """Replace what the stock worker does with a card's memory and its driver."""
    worker = gpu_worker.Worker
    worker.init_device = init_device
    worker._maybe_get_memory_pool_context = no_memory_pool
    gpu_worker.kernel_warmup = warm_up_nothing
    # a small card: fewer programs to interpret
    workspace.DEFAULT_MULTIPROCESSORS = 1


def init_device(self: Any) -> None:
    """Take the CPU as the device, then make the model runner as on a card."""
    self.device = self.device_config.device
    gpu_worker.init_worker_distributed_environment(
        self.vllm_config,
        self.rank,
        self.distributed_init_method,
        self.local_rank,
        "gloo",
    )
    set_random_seed(self.model_config.seed)
    # only printed: tests say how large the KV cache is
    self.init_snapshot = SimpleNamespace(free_memory=0)
    self._init_workspace_and_model_runner()


def no_memory_pool(self: Any, tag: str) -> contextlib.AbstractContextManager[None]:
    """Return a context in which memory is allocated as ever."""
    return contextlib.nullcontext()


def warm_up_nothing(worker: Any) -> None:
    """Warm up no kernels of CUDA's; looking for them imports torchvision."""
