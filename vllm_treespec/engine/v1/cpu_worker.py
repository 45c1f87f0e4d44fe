"""vLLM's CPU worker with draft trees."""

from __future__ import annotations

import logging

from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
from vllm.v1.worker.cpu_worker import CPUWorker

from vllm_treespec.engine.v1.cpu_runner import TreeCPUModelRunner
from vllm_treespec.engine.v1.stock_runner import without_processors
from vllm_treespec.engine.worker import TreeWorkerMixin
from vllm_treespec.schedule.processor import slow_arithmetic

# vLLM prints the lines of loggers below "vllm".
logger = logging.getLogger("vllm.treespec")


class TreeCPUWorker(TreeWorkerMixin, CPUWorker):
    """vLLM's CPU worker with draft trees."""

    def init_device(self) -> None:
        """Make the stock runner, then give it its tree methods.

        The stock method names its runner class itself, so the class is changed after.
        """
        register_backend(
            AttentionBackendEnum.CPU_ATTN,
            "vllm_treespec.engine.attention.BranchingCPUBackend",
        )
        with without_processors(self.vllm_config):
            super().init_device()
        self.model_runner.__class__ = TreeCPUModelRunner
        self.model_runner.init_trees()
        slow = slow_arithmetic(self.model_config.dtype)
        if slow is not None and self.rank == 0:
            logger.warning("Draft trees: %s", slow)
