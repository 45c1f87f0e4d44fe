"""The oracle's trees on vLLM's V2 runner; needs vLLM 0.33."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from benchmarks.gpu.oracle import OracleDrafter, OracleVerifier, use_acceptance
from vllm_treespec.engine.v2.gpu_runner import TreeGPUModelRunner
from vllm_treespec.engine.v2.gpu_worker import TreeGPUWorker
from vllm_treespec.engine.v2.verify import TreeSampler

if TYPE_CHECKING:
    from vllm_treespec.batch.matching import PlacedTrees
    from vllm_treespec.engine.v2.vllm_types import InputBatch


class OracleSampler(TreeSampler):
    """Has drafts accepted by coins."""

    def follow(
        self, trees: PlacedTrees, sampled: Tensor, batch: InputBatch
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Follow the trees, then let coins decide what is accepted."""
        tokens, _, _ = super().follow(trees, sampled, batch)
        decoder = self.runner.decoder
        assert isinstance(decoder.verifier, OracleVerifier)
        assert decoder.scored is not None
        decoder.accept(decoder.verifier.by_coins(trees.tree, decoder.scored))
        return self.put_together(tokens[:, 0], decoder.scored)


class OracleRunner(TreeGPUModelRunner):
    """Drafts by the oracle."""

    drafter_class = OracleDrafter
    sampler_class = OracleSampler


class OracleWorker(TreeGPUWorker):
    """Has the oracle's runner."""

    runner_class = OracleRunner

    def use_acceptance(self, acceptance: float) -> None:
        """Change the acceptance from now on."""
        use_acceptance(self, acceptance)
