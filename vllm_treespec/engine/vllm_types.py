"""What our workers use of vLLM's, with types; seen by type checkers only."""

from __future__ import annotations

from vllm.config import CacheConfig, VllmConfig
from vllm.v1.worker.worker_base import CompilationTimes

from vllm_treespec.engine.v1.runner import TreeRunnerMixin


class StockWorker:
    """vLLM's workers on CPU and GPU."""

    vllm_config: VllmConfig
    cache_config: CacheConfig
    model_runner: TreeRunnerMixin

    def determine_available_memory(self) -> int:
        """Bytes that the KV cache may have."""
        raise NotImplementedError

    def compile_or_warm_up_model(self) -> CompilationTimes:
        """Compile and warm up what was not yet."""
        raise NotImplementedError
