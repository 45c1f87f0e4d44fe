"""Which LoRA adapter belongs to which row of a step, on vLLM's V2 runner."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from vllm.v1.worker.gpu.lora_utils import LoraState

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest

    from vllm_treespec.engine.v2.runner import TreeRunnerMixin


class TreeLoraState(LoraState):
    """vLLM's table of adapters by request; every node has a row of logits.

    The stock one counts one row a request, so that an adapter of the LM head would
    reach rows of other requests.
    """

    def __init__(self, runner: TreeRunnerMixin) -> None:
        """Take the runner, whose decoder knows the step's drafts."""
        super().__init__(runner.max_num_reqs)
        self.runner = runner

    def make_lora_inputs(
        self,
        req_ids: list[str],
        idx_mapping: np.ndarray,
        num_scheduled_tokens: np.ndarray,
    ) -> tuple[tuple[int, ...], tuple[int, ...], set[LoRARequest]]:
        """Adapters by row of logits and by token, and those in use.

        Args:
            req_ids: of the batch.
            idx_mapping: the runner's rows of the requests, int [num_reqs].
            num_scheduled_tokens: int [num_reqs].

        """
        of_requests, of_tokens, active = super().make_lora_inputs(
            req_ids, idx_mapping, num_scheduled_tokens
        )
        of_rows = np.repeat(of_requests, self.runner.decoder.batch.num_rows).tolist()
        return tuple(of_rows), of_tokens, active
