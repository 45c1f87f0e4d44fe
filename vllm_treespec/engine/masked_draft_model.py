"""A draft model that reads its levels under masks, and in CUDA graphs; for GPUs."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm.config import CUDAGraphMode
from vllm.forward_context import BatchDescriptor, set_forward_context
from vllm.v1.attention.backends.utils import PAD_SLOT_ID
from vllm.v1.cudagraph_dispatcher import CudagraphDispatcher

from vllm_treespec.engine.branches import fork_slot
from vllm_treespec.engine.draft_model import PagedDraftModel
from vllm_treespec.engine.masks import NodeMasks

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


class MaskedDraftModel(PagedDraftModel):
    """Keeps the nodes of a tree side by side in one fork, each seeing its ancestors.

    Nodes are numbered as they are read: the root is node 0, in the fork's copy of the
    block that holds it, and a level's nodes lie behind those read before. So a level
    is read without moving any keys and values.
    """

    masks: NodeMasks
    graphs: CudagraphDispatcher | None = None

    def prepare(self, masks: NodeMasks, dispatcher: CudagraphDispatcher) -> None:
        """Read under these masks, and in piecewise CUDA graphs, from now on.

        Args:
            masks: the target's; their rows are the most tokens of a forward.
            dispatcher: vLLM's, which knows the sizes that are captured.

        """
        self.masks = masks
        self.graphs = dispatcher
        self.inputs = GraphInputs(masks.max_tokens, self.device)

    def dummy_run(self, mode: CUDAGraphMode, desc: BatchDescriptor) -> None:
        """Run once without attention, to warm up or to capture a graph."""
        self.inputs.slots[: desc.num_tokens] = PAD_SLOT_ID
        self._run_padded(None, mode, desc)

    def _forks_per_level(self) -> int:
        """All levels of a tree are read in its only fork."""
        return 1

    def _begin_levels(self) -> None:
        """Copy the roots' blocks, which hold the end of the contexts, to the forks."""
        forks = self.forks.block(self.trees[:, 0], 0, 0)
        self.copier.copy(self.root_blocks, forks)
        num_trees = len(self.host_roots)
        self.level_masks = torch.ones(
            (num_trees, 1), dtype=torch.int64, device=self.device
        )
        self.num_read = 1

    def extend(self, token_ids: Tensor, parents: Tensor) -> Tensor:
        """Read one more level; see ``proposers.DraftModel.extend``."""
        num_trees, width = token_ids.shape
        self.level += 1
        nodes = torch.arange(self.num_read, self.num_read + width, device=self.device)
        self.level_masks = self.level_masks.gather(1, parents) | (1 << nodes)
        self.num_read += width
        rows = torch.arange(num_trees * width, device=self.device)
        roots = self.root_positions[:, 0]
        self.masks.put(rows, self.level_masks.flatten(), self.trees[:, 0], roots)
        hidden = self._forward(
            token_ids.flatten(),
            (self.root_positions + self.level).repeat(1, width).flatten(),
            fork_slot(self.root_positions, nodes, self.trees, 0, self.forks).flatten(),
            np.arange(num_trees + 1) * width,
            self.host_roots + self.num_read,
            self.fork_tables[:, 0],
        )
        self.masks.clear()
        return self._level_logits(hidden, width)

    def _run(
        self,
        attn_metadata: dict[str, Any] | None,
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
        attn_metadata: dict[str, Any] | None,
        mode: CUDAGraphMode,
        desc: BatchDescriptor,
    ) -> Tensor:
        inputs, size = self.inputs, desc.num_tokens
        with set_forward_context(
            attn_metadata,
            self.vllm_config,
            num_tokens=size,
            slot_mapping=self._slot_mapping(inputs.slots[:size]),
            cudagraph_runtime_mode=mode,
            batch_descriptor=desc,
        ):
            return self.model(
                input_ids=inputs.token_ids[:size], positions=inputs.positions[:size]
            )
