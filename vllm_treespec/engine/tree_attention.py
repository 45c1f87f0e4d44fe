"""The attention backend for trees under masks: vLLM's Triton backend, and our kernel.

Batches without trees run on the stock kernel. KV cache layout, writes to it and all
metadata are stock; a tree batch has masks besides.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, ClassVar

from torch import Tensor
from vllm.v1.attention.backend import (
    AttentionCGSupport,
    AttentionType,
    CommonAttentionMetadata,
)
from vllm.v1.attention.backends.triton_attn import (
    TritonAttentionBackend,
    TritonAttentionImpl,
    TritonAttentionMetadata,
    TritonAttentionMetadataBuilder,
)
from vllm.v1.kv_cache_interface import KVQuantMode

from vllm_treespec.kernels.tree_attention import Workspace, tree_attention
from vllm_treespec.layouts.node_masks import NodeMasks

if TYPE_CHECKING:
    from vllm.v1.attention.backend import AttentionLayer

# Those that the kernel is tested with.
HEAD_SIZES = (64, 80, 96, 128, 256)


@dataclass
class TreeAttentionMetadata(TritonAttentionMetadata):
    """The stock metadata, and the trees'."""

    # None: a batch without trees, for the stock kernel
    masks: NodeMasks | None = None
    workspace: Workspace | None = None


class TreeAttentionMetadataBuilder(TritonAttentionMetadataBuilder):
    """The stock metadata builder, which adds the masks of a batch with trees.

    Full CUDA graphs of batches in which every request brings several rows have our
    kernel in them, whatever the masks are at replay.
    """

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_BATCH
    masks: NodeMasks | None = None

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> TritonAttentionMetadata:
        """Build the stock metadata, with masks where the batch may have trees."""
        stock = super().build(common_prefix_len, common_attn_metadata, fast_build)
        if self.masks is None:
            # another engine of this process, without trees
            return stock
        metadata = TreeAttentionMetadata(
            **{field.name: getattr(stock, field.name) for field in fields(stock)}
        )
        if self.masks.has_masks:
            self.add_masks(metadata)
        return metadata

    def build_for_cudagraph_capture(
        self, common_attn_metadata: CommonAttentionMetadata
    ) -> TritonAttentionMetadata:
        """Build metadata of a graph, with masks where its batches may have trees."""
        metadata = super().build_for_cudagraph_capture(common_attn_metadata)
        if common_attn_metadata.max_query_len > 1 and self.masks is not None:
            assert isinstance(metadata, TreeAttentionMetadata)
            self.add_masks(metadata)
            self.masks.graphs.add(
                (common_attn_metadata.num_reqs, common_attn_metadata.num_actual_tokens)
            )
        return metadata

    def add_masks(self, metadata: TreeAttentionMetadata) -> None:
        """Let a batch run on our kernel."""
        assert self.masks is not None
        metadata.masks = self.masks
        metadata.workspace = self.masks.workspace(self.num_heads_q, self.headdim)

    @property
    def max_tree_nodes(self) -> int:
        """Query rows of a request that brings the largest tree."""
        speculative = self.vllm_config.speculative_config
        assert speculative is not None
        return 1 + speculative.num_speculative_tokens


class TreeAttentionImpl(TritonAttentionImpl):
    """The stock Triton attention, and tree attention where there are masks."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        """Make the stock implementation.

        Raises:
            ValueError: the layer needs something that the tree kernel leaves out.

        """
        super().__init__(*args, **kwargs)
        # The kernel takes queries as they are; only keys and values may be 8 bit.
        self.supports_quant_query_input = False
        left_out = {
            f"head size {self.head_size}": self.head_size not in HEAD_SIZES,
            "ALiBi": self.alibi_slopes is not None or self.use_alibi_sqrt,
            f"attention of type {self.attn_type}": self.attn_type
            != AttentionType.DECODER,
            f"KV cache of type {self.kv_cache_dtype}": self._kv_quant_mode
            not in (KVQuantMode.NONE, KVQuantMode.FP8_PER_TENSOR),
            "chunked local attention": self.chunk_lookback > -1,
            "a KV cache shared between layers": self.kv_sharing_target_layer_name
            is not None,
        }
        for what, found in left_out.items():
            if found:
                raise ValueError(
                    f"draft trees on a GPU do not support {what}; "
                    f"remove speculative_config"
                )

    def fused_output_quant_supported(self, quant_key: object) -> bool:
        """The tree kernel writes unquantised outputs only."""
        return False

    def forward(
        self,
        layer: AttentionLayer,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: TritonAttentionMetadata,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """Attend, under masks where the batch has trees; see the stock method."""
        if not isinstance(attn_metadata, TreeAttentionMetadata) or (
            attn_metadata.masks is None
        ):
            return super().forward(
                layer,
                query,
                key,
                value,
                kv_cache,
                attn_metadata,
                output,
                output_scale,
                output_block_scale,
            )
        return self.attend_under_masks(layer, query, kv_cache, attn_metadata, output)

    def attend_under_masks(
        self,
        layer: AttentionLayer,
        query: Tensor,
        kv_cache: Tensor,
        attn_metadata: TreeAttentionMetadata,
        output: Tensor,
    ) -> Tensor:
        """Run the tree kernel over the whole batch."""
        masks, workspace = attn_metadata.masks, attn_metadata.workspace
        assert masks is not None
        assert workspace is not None
        key_cache, value_cache = kv_cache.transpose(1, 2).split(self.head_size, dim=-1)
        scaled = self._kv_quant_mode == KVQuantMode.FP8_PER_TENSOR
        if scaled:
            key_cache = key_cache.view(self.fp8_dtype)
            value_cache = value_cache.view(self.fp8_dtype)
        num_tokens = attn_metadata.num_actual_tokens
        tree_attention(
            query[:num_tokens],
            key_cache,
            value_cache,
            output[:num_tokens],
            query_start_loc=attn_metadata.query_start_loc,
            seq_lens=attn_metadata.seq_lens,
            block_table=attn_metadata.block_table,
            node_masks=masks.node_masks,
            tree_starts=masks.tree_starts,
            max_query_len=attn_metadata.max_query_len,
            scale=self.scale,
            sliding_window=self.sliding_window[0] + 1,
            soft_cap=self.logits_soft_cap,
            key_scale=layer._k_scale if scaled else None,
            value_scale=layer._v_scale if scaled else None,
            sinks=self.sinks,
            workspace=workspace,
        )
        return output


class TreeAttentionBackend(TritonAttentionBackend):
    """The stock Triton backend, with trees."""

    @staticmethod
    def get_impl_cls() -> type[TritonAttentionImpl]:
        """Return the implementation."""
        return TreeAttentionImpl

    @staticmethod
    def get_builder_cls() -> type[TritonAttentionMetadataBuilder]:
        """Return the metadata builder."""
        return TreeAttentionMetadataBuilder
