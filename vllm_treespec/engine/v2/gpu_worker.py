"""vLLM's GPU worker with draft trees on the V2 runner."""

from __future__ import annotations

from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
from vllm.v1.worker.gpu_worker import Worker
from vllm.v1.worker.worker_base import CompilationTimes

from vllm_treespec.engine.refusals import TREE_ATTENTION
from vllm_treespec.engine.v2.gpu_runner import TreeGPUModelRunner
from vllm_treespec.engine.warm_up import warm_up_attention, warm_up_commit
from vllm_treespec.engine.worker import TreeWorkerMixin
from vllm_treespec.kernels import follow, gumbel


class TreeGPUWorker(TreeWorkerMixin, Worker):
    """vLLM's GPU worker with draft trees on the V2 runner."""

    runner_class = TreeGPUModelRunner

    def _make_model_runner(self) -> TreeGPUModelRunner:
        """Make our runner, with tree attention in the place of Triton attention."""
        register_backend(AttentionBackendEnum.TRITON_ATTN, TREE_ATTENTION)
        runner = self.runner_class(self.vllm_config, self.device)
        runner.init_trees()
        return runner

    def compile_or_warm_up_model(self) -> CompilationTimes:
        """Compile our kernels, then what vLLM compiles and captures."""
        warm_up_attention(self.model_runner)
        warm_up_commit(self.model_runner.decoder.layout)
        follow.warm_up(self.model_runner.device)
        gumbel.warm_up(self.model_runner.device)
        return super().compile_or_warm_up_model()
