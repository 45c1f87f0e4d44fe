"""vLLM's CPU model runner with draft trees."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor
from vllm.model_executor.layers.attention import ChunkedLocalAttention
from vllm.v1.worker.cpu_model_runner import CPUModelRunner

from vllm_treespec.engine.attention import BranchingImpl
from vllm_treespec.engine.attention_check import check_attention
from vllm_treespec.engine.draft_model import PagedDraftModel
from vllm_treespec.engine.v1.runner import TreeRunnerMixin
from vllm_treespec.layouts.base import LayoutLimits
from vllm_treespec.layouts.branches import BranchLayout

if TYPE_CHECKING:
    from vllm.v1.outputs import SamplerOutput
    from vllm.v1.spec_decode.metadata import SpecDecodeMetadata


class TreeCPUModelRunner(TreeRunnerMixin, CPUModelRunner):
    """vLLM's CPU model runner with draft trees.

    It also works around a crash of stock vLLM 0.32 on CPU. vLLM draws a token for an
    incomplete prompt, too, and then sets the generator of its seeded request back by
    an offset, which CPU generators do not have. So these generators are set aside
    while tokens are drawn.
    """

    draft_model_class = PagedDraftModel
    batched_rules = False

    def make_layout(self, limits: LayoutLimits) -> BranchLayout:
        """Trees along branches, for vLLM's own kernels."""
        self.layout = BranchLayout(limits)
        return self.layout

    def connect_attention(self, kv_caches: dict[str, Tensor]) -> None:
        """Let layers and metadata builders see their group's plan of the step."""
        layers = self.compilation_config.static_forward_context
        check_attention(layers, kv_caches, BranchingImpl)
        for number, shared in zip(
            self.group_order, self.layout.shared_plans, strict=True
        ):
            for group in self.attn_groups[number]:
                for name in group.layer_names:
                    layers[name].impl.shared_plan = shared
                layer = layers[group.layer_names[0]]
                chunked = isinstance(layer, ChunkedLocalAttention)
                for builder in group.metadata_builders:
                    builder.shared_plan = shared
                    builder.chunk = layer.attention_chunk_size if chunked else None

    def _sample(
        self, logits: Tensor | None, spec_decode_metadata: SpecDecodeMetadata | None
    ) -> SamplerOutput:
        """Sample without the generators of incomplete prompts."""
        batch = self.input_batch
        incomplete = np.flatnonzero(self.discard_request_mask.np[: batch.num_reqs])
        self._withheld_generators = {
            r: batch.generators.pop(r)
            for r in incomplete.tolist()
            if r in batch.generators
        }
        return super()._sample(logits, spec_decode_metadata)

    def _bookkeeping_sync(self, *args: object) -> object:
        """Do the bookkeeping, then restore the generators."""
        result = super()._bookkeeping_sync(*args)
        self.input_batch.generators.update(self._withheld_generators)
        return result
