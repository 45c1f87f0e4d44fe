"""Runs tree attention in all its forms, and commit: no request waits for a compiler.

The kernel's form follows from the layer, and from the batch: how many rows its longest
request has, and whether contexts are split. Graphs compile only what they hold.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from vllm.v1.attention.backend import CommonAttentionMetadata

from vllm_treespec.layouts.masks import MaskLayout

if TYPE_CHECKING:
    from vllm_treespec.engine.tree_attention import TreeAttentionImpl
    from vllm_treespec.engine.v1.runner import TreeRunnerMixin
    from vllm_treespec.layouts.base import TreeLayout

# Rows of a prompt's chunk, more than one block of the kernel holds.
PROMPT_ROWS = 256


def warm_up_attention(runner: TreeRunnerMixin) -> None:
    """Call the kernel with empty contexts, which reads and writes no KV.

    ``runner`` has its KV cache.
    """
    layers = runner.compilation_config.static_forward_context
    for number, group in (
        (number, group)
        for number, groups in enumerate(runner.attn_groups)
        for group in groups
    ):
        builder = group.get_metadata_builder()
        one_of_each = {form(layers[n].impl): layers[n] for n in group.layer_names}
        for num_reqs, query_len in batches(
            runner.max_num_reqs, builder.max_tree_nodes, runner.max_num_tokens
        ):
            batch = empty_batch(runner, number, num_reqs, query_len)
            metadata = builder.build(0, batch)
            builder.add_masks(metadata)
            for layer in one_of_each.values():
                query = torch.zeros(
                    (num_reqs * query_len, layer.impl.num_heads, layer.impl.head_size),
                    dtype=runner.model_config.dtype,
                    device=runner.device,
                )
                layer.impl.attend_under_masks(
                    layer, query, layer.kv_cache, metadata, torch.empty_like(query)
                )


def warm_up_commit(layout: TreeLayout) -> None:
    """Commit nothing once; the layout has its KV caches."""
    assert isinstance(layout, MaskLayout)
    layout.warm_up()


def form(impl: TreeAttentionImpl) -> tuple[int, bool, bool]:
    """What of a layer its kernels are compiled for: heads, window, sinks."""
    return impl.num_heads, impl.sliding_window[0] >= 0, impl.sinks is not None


def batches(
    max_reqs: int, max_tree_nodes: int, max_tokens: int
) -> Iterator[tuple[int, int]]:
    """Numbers of requests and of rows of each, one batch for every form."""
    most = min(max(PROMPT_ROWS, max_tree_nodes), max_tokens)
    rows = [1 << exponent for exponent in range(most.bit_length())]
    for query_len in sorted({*rows, max_tree_nodes, most}):
        for num_reqs in (1, max_reqs):
            if num_reqs * query_len <= max_tokens:
                yield num_reqs, query_len


def empty_batch(
    runner: TreeRunnerMixin, number: int, num_reqs: int, query_len: int
) -> CommonAttentionMetadata:
    """A batch of requests without any key, for the KV cache group of this number."""
    num_tokens = num_reqs * query_len
    starts = torch.arange(0, num_tokens + 1, query_len, dtype=torch.int32)
    seq_lens = torch.zeros(num_reqs, dtype=torch.int32)
    block_table, slot_mapping = runner.group_tables(number)
    return CommonAttentionMetadata(
        query_start_loc=starts.to(runner.device),
        query_start_loc_cpu=starts,
        seq_lens=seq_lens.to(runner.device),
        seq_lens_cpu_upper_bound=seq_lens,
        num_reqs=num_reqs,
        num_actual_tokens=num_tokens,
        max_query_len=query_len,
        max_seq_len=0,
        block_table_tensor=block_table[:num_reqs],
        slot_mapping=slot_mapping[:num_tokens],
    )
