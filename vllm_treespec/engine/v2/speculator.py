"""What stands in the place of vLLM's speculator: trees are drawn later."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from vllm_treespec.engine.v2.vllm_types import InputBatch


class LateDrafts:
    """Proposes nothing at the end of a step: the next one begins by drawing its trees.

    It has the interface of vLLM's ``BaseSpeculator``, as far as runners call it.
    """

    supports_mm_inputs = False
    draft_logits = None
    num_query_per_req = 1
    num_extra_query_per_req = 0
    pcp_manager = None

    def __init__(
        self, max_num_reqs: int, num_drafts: int, device: torch.device
    ) -> None:
        """Allocate the placeholders."""
        # token 0, always: -1 would be read outside of the embedding
        self.placeholders = torch.zeros(
            (max_num_reqs, num_drafts), dtype=torch.int64, device=device
        )

    def init_cudagraph_manager(self, cudagraph_mode: object) -> None:
        """Nothing is captured."""

    def capture(self) -> None:
        """Nothing is captured."""

    def propose(
        self, input_batch: InputBatch, *inputs: object, **options: object
    ) -> Tensor:
        """Placeholders, int64 [num_reqs, num_drafts]."""
        return self.placeholders[: input_batch.num_reqs]
