"""vLLM's V2 GPU model runner with draft trees."""

from __future__ import annotations

from itertools import chain

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


class TreeGPUModelRunner(TreeRunnerMixin, GPUModelRunner):
    """vLLM's V2 GPU model runner with draft trees under masks."""

    masks: NodeMasks
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

    def connect_attention(self) -> None:
        """Let every metadata builder see the masks."""
        layers = self.compilation_config.static_forward_context
        groups = self.kv_cache_config.kv_cache_groups
        names = chain.from_iterable(group.layer_names for group in groups)
        check_attention(layers, names, TreeAttentionImpl)
        show_masks(self)
