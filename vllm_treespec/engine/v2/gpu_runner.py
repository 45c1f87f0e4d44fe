"""vLLM's V2 GPU model runner with draft trees."""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING

from torch import Tensor
from vllm.config import CUDAGraphMode
from vllm.v1.worker.gpu.model_runner import GPUModelRunner

from vllm_treespec.engine.attention_check import check_attention
from vllm_treespec.engine.draft_model import PagedDraftModel
from vllm_treespec.engine.masked_runner import (
    make_masks,
    make_workspaces,
    measure_trees,
    show_masks,
)
from vllm_treespec.engine.tree_attention import TreeAttentionImpl
from vllm_treespec.engine.v2.runner import TreeRunnerMixin
from vllm_treespec.layouts.base import LayoutLimits
from vllm_treespec.layouts.masks import MaskLayout
from vllm_treespec.layouts.node_masks import NodeMasks

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor
    from vllm.v1.worker.gpu.model_runner import BatchReqState

    from vllm_treespec.engine.v2.vllm_types import InputBatch


class TreeGPUModelRunner(TreeRunnerMixin, GPUModelRunner):
    """vLLM's V2 GPU model runner with draft trees under masks."""

    masks: NodeMasks
    graph: BatchExecutionDescriptor
    # without graphs: vLLM's V2 runner has another way of capturing them
    draft_model_class = PagedDraftModel

    def make_layout(self, limits: LayoutLimits) -> MaskLayout:
        """Trees under masks, for our kernel; allocates what graphs keep."""
        return make_masks(self, limits)

    def profile_run(self, *args: object, **options: object) -> None:
        """Run the models once, and draw and score trees."""
        make_workspaces(self)
        super().profile_run(*args, **options)
        measure_trees(self)

    def prepare_inputs(
        self,
        scheduler_output: SchedulerOutput,
        batch_req_state: BatchReqState,
        graph: BatchExecutionDescriptor,
        *args: object,
    ) -> InputBatch:
        """Prepare the stock inputs, and note which CUDA graph the step replays."""
        self.graph = graph
        return super().prepare_inputs(scheduler_output, batch_req_state, graph, *args)

    def prepare_attn(
        self, input_batch: InputBatch
    ) -> tuple[tuple[Tensor, ...], Tensor]:
        """Lay out the trees; their step runs no graph without masks."""
        prepared = super().prepare_attn(input_batch)
        if self.masks.has_masks and self.graph.cg_mode == CUDAGraphMode.FULL:
            shape = self.graph.num_reqs, self.graph.num_tokens
            assert shape in self.masks.graphs, f"the graph of {shape} has no masks"
        return prepared

    def connect_attention(self) -> None:
        """Let every metadata builder see the masks."""
        layers = self.compilation_config.static_forward_context
        groups = self.kv_cache_config.kv_cache_groups
        names = chain.from_iterable(group.layer_names for group in groups)
        check_attention(layers, names, TreeAttentionImpl)
        show_masks(self)
