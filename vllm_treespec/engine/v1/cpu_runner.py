"""vLLM's CPU model runner with draft trees."""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor
from vllm.v1.worker.cpu_model_runner import CPUModelRunner

from vllm_treespec.engine.v1.runner import TreeRunnerMixin


class TreeCPUModelRunner(TreeRunnerMixin, CPUModelRunner):
    """vLLM's CPU model runner with draft trees.

    It also mends what kills stock vLLM 0.32 on CPU: a token is drawn for a prompt that
    is not complete, too, and then the generator of its seeded request is set back by an
    offset, which CPU generators do not have. Here they are set aside meanwhile.
    """

    def _sample(self, logits: Tensor | None, spec_decode_metadata: Any) -> Any:
        """Sample without the generators of incomplete prompts."""
        batch = self.input_batch
        incomplete = np.flatnonzero(self.discard_request_mask.np[: batch.num_reqs])
        self._set_aside = {
            r: batch.generators.pop(r)
            for r in incomplete.tolist()
            if r in batch.generators
        }
        return super()._sample(logits, spec_decode_metadata)

    def _bookkeeping_sync(self, *args: Any) -> Any:
        """Keep the books, then put the generators back."""
        result = super()._bookkeeping_sync(*args)
        self.input_batch.generators.update(self._set_aside)
        return result
