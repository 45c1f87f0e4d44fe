"""The oracle's trees on vLLM's V2 runner; needs vLLM 0.33."""

from benchmarks.gpu.oracle import OracleDrafter
from vllm_treespec.engine.v2.gpu_runner import TreeGPUModelRunner
from vllm_treespec.engine.v2.gpu_worker import TreeGPUWorker


class OracleRunner(TreeGPUModelRunner):
    """Drafts by the oracle."""

    drafter_class = OracleDrafter


class OracleWorker(TreeGPUWorker):
    """Has the oracle's runner."""

    runner_class = OracleRunner
