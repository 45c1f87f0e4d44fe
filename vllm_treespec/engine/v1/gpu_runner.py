"""vLLM's GPU model runner with draft trees."""

from __future__ import annotations

import torch
from torch import Tensor
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from vllm_treespec.engine.attention_check import check_attention
from vllm_treespec.engine.graphed_draft_model import GraphedDraftModel, draft_graph
from vllm_treespec.engine.masked_runner import (
    make_masks,
    make_workspaces,
    measure_trees,
    show_masks,
)
from vllm_treespec.engine.tree_attention import TreeAttentionImpl
from vllm_treespec.engine.v1.runner import TreeRunnerMixin
from vllm_treespec.layouts.base import LayoutLimits
from vllm_treespec.layouts.masks import MaskLayout
from vllm_treespec.layouts.node_masks import NodeMasks


class TreeGPUModelRunner(TreeRunnerMixin, GPUModelRunner):
    """vLLM's V1 GPU model runner with draft trees.

    The target's CUDA graphs are stock: full ones for batches in which every request
    brings the largest tree, piecewise ones for others. Draft models get piecewise
    graphs of the same sizes, captured beside the target's.
    """

    masks: NodeMasks
    draft_model_class = GraphedDraftModel
    batched_rules = True

    def make_layout(self, limits: LayoutLimits) -> MaskLayout:
        """Trees under masks, for our kernel; allocates what graphs keep."""
        return make_masks(self, limits)

    def connect_attention(self, kv_caches: dict[str, Tensor]) -> None:
        """Let every metadata builder see the masks."""
        layers = self.compilation_config.static_forward_context
        check_attention(layers, kv_caches, TreeAttentionImpl)
        show_masks(self)

    def profile_run(self, *args: object, **options: object) -> None:
        """Run the models once, and draw and score trees.

        Buffers that last are made before, so that they are measured.
        """
        make_workspaces(self)
        for source in self.drafter.paged:
            if isinstance(source, GraphedDraftModel):
                source.prepare(self.masks.max_tokens, self.cudagraph_dispatcher)
        super().profile_run(*args, **options)
        measure_trees(self)

    @torch.inference_mode()
    def _dummy_run(
        self, num_tokens: int, *args: object, **options: object
    ) -> tuple[Tensor, Tensor]:
        """Run the target, then the draft models where they have a part in the run."""
        outputs = super()._dummy_run(num_tokens, *args, **options)
        graph = draft_graph(self.cudagraph_dispatcher, num_tokens, options)
        if graph is not None:
            for source in self.drafter.paged:
                if isinstance(source, GraphedDraftModel):
                    source.dummy_run(*graph)
        return outputs
