"""A draft model that runs in CUDA graphs."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from vllm.config import CUDAGraphMode
from vllm.forward_context import BatchDescriptor
from vllm.v1.attention.backend import AttentionMetadata
from vllm.v1.attention.backends.utils import PAD_SLOT_ID
from vllm.v1.cudagraph_dispatcher import CudagraphDispatcher

from vllm_treespec.engine.draft_model import PagedDraftModel

PIECEWISE = {CUDAGraphMode.PIECEWISE, CUDAGraphMode.NONE}


class GraphInputs:
    """Inputs of a model in tensors that last, padded to the size of a graph."""

    def __init__(self, max_tokens: int, device: torch.device) -> None:
        """Allocate for the largest forward."""
        self.token_ids = torch.zeros(max_tokens, dtype=torch.int32, device=device)
        self.positions = torch.zeros(max_tokens, dtype=torch.int64, device=device)
        self.slots = torch.zeros(max_tokens, dtype=torch.int64, device=device)

    def fill(
        self, token_ids: Tensor, positions: Tensor, slots: Tensor, size: int
    ) -> None:
        """Copy a forward's inputs; padding writes to no slot."""
        num_tokens = len(token_ids)
        self.token_ids[:num_tokens] = token_ids
        self.positions[:num_tokens] = positions
        self.slots[:num_tokens] = slots
        self.slots[num_tokens:size] = PAD_SLOT_ID


def draft_graph(
    dispatcher: CudagraphDispatcher, num_tokens: int, options: Mapping[str, object]
) -> tuple[CUDAGraphMode, BatchDescriptor] | None:
    """How draft models run in one of vLLM's dummy runs; None: they do not.

    They run before and while piecewise graphs are captured. vLLM names the mode in
    those runs only; whole trees have graphs of the target's alone. With LoRA vLLM has
    graphs for batches with adapters only, which drafts are not: they run without.

    Args:
        dispatcher: vLLM's, which knows the sizes that are captured.
        num_tokens: of the dummy run.
        options: of the dummy run, by their names there.

    """
    mode = options.get("cudagraph_runtime_mode")
    if mode not in PIECEWISE or options.get("uniform_decode"):
        return None
    valid_modes = {mode, CUDAGraphMode.NONE}
    mode, desc = dispatcher.dispatch(num_tokens, valid_modes=valid_modes)
    return mode, desc


class GraphedDraftModel(PagedDraftModel):
    """Runs in piecewise CUDA graphs of the sizes that vLLM captures for the target."""

    graphs: CudagraphDispatcher | None = None

    def prepare(self, max_tokens: int, dispatcher: CudagraphDispatcher) -> None:
        """Run in graphs from now on.

        Args:
            max_tokens: tokens of the largest forward.
            dispatcher: vLLM's, which knows the sizes that are captured.

        """
        self.graphs = dispatcher
        self.inputs = GraphInputs(max_tokens, self.device)

    def dummy_run(self, mode: CUDAGraphMode, desc: BatchDescriptor) -> Tensor:
        """Run once without attention, to warm up, capture a graph or time it."""
        self.inputs.slots[: desc.num_tokens] = PAD_SLOT_ID
        return self._run_padded(None, mode, desc)

    def run_level(self, num_rows: int) -> None:
        """Run as for a level of so many nodes, without attention, to time it."""
        assert self.graphs is not None, "it runs after graphs were captured"
        mode, desc = self.graphs.dispatch(num_rows, valid_modes=PIECEWISE)
        self.output_layer(self.dummy_run(mode, desc)[:num_rows])

    def _run(
        self,
        attn_metadata: dict[str, AttentionMetadata] | None,
        token_ids: Tensor,
        positions: Tensor,
        slots: Tensor | None,
    ) -> Tensor:
        """Run the model, in a graph where one of a fitting size was captured."""
        if self.graphs is None or slots is None:
            return super()._run(attn_metadata, token_ids, positions, slots)
        num_tokens = len(token_ids)
        mode, desc = self.graphs.dispatch(num_tokens, valid_modes=PIECEWISE)
        self.inputs.fill(token_ids, positions, slots, desc.num_tokens)
        return self._run_padded(attn_metadata, mode, desc)[:num_tokens]

    def _run_padded(
        self,
        attn_metadata: dict[str, AttentionMetadata] | None,
        mode: CUDAGraphMode,
        desc: BatchDescriptor,
    ) -> Tensor:
        inputs, size = self.inputs, desc.num_tokens
        with self.forward_context(
            attn_metadata,
            size,
            inputs.slots[:size],
            cudagraph_runtime_mode=mode,
            batch_descriptor=desc,
        ):
            return self.model(
                input_ids=inputs.token_ids[:size], positions=inputs.positions[:size]
            )
