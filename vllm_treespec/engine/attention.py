"""Attention backends that read and write along branches (see layouts/branches.py).

The kernels stay vLLM's own. A backend here differs from its stock parent only while
its layers' ``SharedPlan`` holds a plan: then the metadata describe the branches'
sequences, and keys and values also go to the fork blocks.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from torch import Tensor
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionBackendImpl,
    CPUAttentionMetadataBuilder,
)
from vllm.v1.attention.backends.utils import make_local_attention_virtual_batches

from vllm_treespec.layouts.branch_plan import BranchPlan
from vllm_treespec.layouts.branches import SharedPlan

if TYPE_CHECKING:
    from vllm.v1.attention.backend import AttentionLayer, AttentionMetadata


def along_branches(
    metadata: CommonAttentionMetadata, plan: BranchPlan
) -> CommonAttentionMetadata:
    """The batch's attention metadata with one sequence per branch."""
    return replace(
        metadata,
        query_start_loc=plan.query_start_loc,
        query_start_loc_cpu=plan.query_start_loc.cpu(),
        seq_lens=plan.seq_lens,
        seq_lens_cpu_upper_bound=plan.seq_lens.cpu(),
        num_reqs=plan.seq_lens.shape[0],
        block_table_tensor=plan.block_table,
        is_prefilling=None,
    )


class BranchingBuilder:
    """Mixin for metadata builders.

    For layers that see one chunk of the context, vLLM subclasses a builder. That one
    cuts the requests into chunks first; so branches are cut here.
    """

    shared_plan: SharedPlan | None = None
    # tokens of a chunk; None: the layers see the whole context
    chunk: int | None = None

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> AttentionMetadata:
        """Build the stock metadata, of the branches if there are any."""
        if self.shared_plan is not None and self.shared_plan.plan is not None:
            common_attn_metadata = along_branches(
                common_attn_metadata, self.shared_plan.plan
            )
            if self.chunk is not None:
                common_attn_metadata, _ = make_local_attention_virtual_batches(
                    self.chunk,
                    common_attn_metadata,
                    self.kv_cache_spec.block_size,  # type: ignore[attr-defined]
                )
        return super().build(  # type: ignore[misc]
            common_prefix_len, common_attn_metadata, fast_build
        )


class BranchingImpl:
    """Mixin for attention implementations with a separate KV cache update."""

    shared_plan: SharedPlan | None = None

    def do_kv_cache_update(
        self,
        layer: AttentionLayer,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        slot_mapping: Tensor,
    ) -> None:
        """Write keys and values, to every branch that reads them."""
        if self.shared_plan is not None and self.shared_plan.plan is not None:
            plan = self.shared_plan.plan
            key = key.index_select(0, plan.write_rows)
            value = value.index_select(0, plan.write_rows)
            slot_mapping = plan.write_slots
        super().do_kv_cache_update(  # type: ignore[misc]
            layer, key, value, kv_cache, slot_mapping
        )


class BranchingCPUBuilder(BranchingBuilder, CPUAttentionMetadataBuilder):
    """The stock CPU metadata builder, along branches."""


class BranchingCPUImpl(BranchingImpl, CPUAttentionBackendImpl):
    """The stock CPU attention, along branches."""


class BranchingCPUBackend(CPUAttentionBackend):
    """The stock CPU backend, along branches."""

    @staticmethod
    def get_impl_cls() -> type[CPUAttentionBackendImpl]:
        """Return the implementation."""
        return BranchingCPUImpl

    @staticmethod
    def get_builder_cls() -> type[CPUAttentionMetadataBuilder]:
        """Return the metadata builder."""
        return BranchingCPUBuilder
