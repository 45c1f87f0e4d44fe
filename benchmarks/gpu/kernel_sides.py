"""The attention kernels that the table compares, each as a call without arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.kernel_inputs import Batch

TREE, CHAIN, STOCK, FA3 = "tree", "chain", "stock-triton", "fa3"
SIDES = {
    TREE: "ours, a random tree of that many nodes",
    CHAIN: "ours, the same number of query tokens as a causal chain (mask 0)",
    STOCK: "vLLM's Triton unified attention, causal chain",
    FA3: "FlashAttention 3, causal chain",
}
# As in vLLM's Triton backend.
SEGMENTS = 16
MIN_LAUNCH_GRID = 128
MAX_SPLIT_QUERY_LEN = 8

Call = Callable[[], Any]


class MissingKernelError(RuntimeError):
    """A kernel that this machine does not have; the message says why."""


def make_side(name: str, batch: Batch, output: Tensor) -> Call:
    """Make the call of a side, which writes into ``output``.

    Raises:
        MissingKernelError: when the kernel is not there, or not for this shape.

    """
    if name in (TREE, CHAIN):
        return ours(batch, output, tree=name == TREE)
    call = {STOCK: stock_triton, FA3: flash_attention}[name](batch, output)
    try:
        call()
        # waits, so that what fails on the card fails here
        output.flatten()[0].item()
    except RuntimeError as error:
        reason = str(error).strip().splitlines()[0]
        raise MissingKernelError(f"it fails: {reason}") from None
    return call


def ours(batch: Batch, output: Tensor, tree: bool) -> Call:
    """Our kernel, on trees or on chains."""
    from vllm_treespec.kernels.tree_attention import Workspace, tree_attention

    masks = batch.node_masks if tree else torch.zeros_like(batch.node_masks)
    workspace = Workspace(
        max_tokens=len(batch.query),
        num_heads=batch.heads.num_heads,
        head_size=batch.heads.head_size,
        device=batch.query.device,
    )

    def call() -> None:
        tree_attention(
            batch.query,
            batch.key_cache,
            batch.value_cache,
            output,
            query_start_loc=batch.query_start_loc,
            seq_lens=batch.seq_lens,
            block_table=batch.block_table,
            node_masks=masks,
            tree_starts=batch.tree_starts,
            max_query_len=batch.case.nodes,
            scale=batch.scale,
            workspace=workspace,
        )

    return call


def stock_triton(batch: Batch, output: Tensor) -> Call:
    """vLLM's causal kernel, called as its Triton backend calls it."""
    try:
        from vllm.v1.attention.ops.triton_unified_attention import unified_attention
    except ImportError as error:
        raise MissingKernelError(f"vLLM's kernel does not import: {error}") from None
    heads, nodes = batch.heads, batch.case.nodes
    threshold = MIN_LAUNCH_GRID // heads.num_kv_heads
    rows = threshold * min(nodes, MAX_SPLIT_QUERY_LEN)
    device = batch.query.device
    segments = (rows, heads.num_heads, SEGMENTS)
    head_size_padded = 1 << (heads.head_size - 1).bit_length()
    arguments: dict[str, Any] = {
        "q": batch.query,
        "k": batch.key_cache,
        "v": batch.value_cache,
        "out": output,
        "cu_seqlens_q": batch.query_start_loc,
        "max_seqlen_q": nodes,
        "seqused_k": batch.seq_lens,
        "max_seqlen_k": batch.case.context + nodes,
        "softmax_scale": batch.scale,
        "causal": True,
        "window_size": (-1, -1),
        "block_table": batch.block_table,
        "softcap": 0,
        "q_descale": None,
        "k_descale": torch.ones((batch.case.batch, heads.num_kv_heads), device=device),
        "v_descale": torch.ones((batch.case.batch, heads.num_kv_heads), device=device),
        "seq_threshold_3D": threshold,
        "num_par_softmax_segments": SEGMENTS,
        "softmax_segm_output": torch.empty(
            (*segments, head_size_padded), dtype=torch.float32, device=device
        ),
        "softmax_segm_max": torch.empty(segments, dtype=torch.float32, device=device),
        "softmax_segm_expsum": torch.empty(
            segments, dtype=torch.float32, device=device
        ),
    }
    return lambda: unified_attention(**arguments)


def flash_attention(batch: Batch, output: Tensor) -> Call:
    """FlashAttention 3 as vLLM brings it, causal over the paged cache."""
    try:
        from vllm.vllm_flash_attn import (
            fa_version_unsupported_reason,
            flash_attn_varlen_func,
            is_fa_version_supported,
        )
    except ImportError as error:
        raise MissingKernelError(f"it does not import: {error}") from None
    if not is_fa_version_supported(3):
        raise MissingKernelError(str(fa_version_unsupported_reason(3)))
    arguments: dict[str, Any] = {
        "q": batch.query,
        "k": batch.key_cache,
        "v": batch.value_cache,
        "out": output,
        "max_seqlen_q": batch.case.nodes,
        "cu_seqlens_q": batch.query_start_loc,
        "max_seqlen_k": batch.case.context + batch.case.nodes,
        "seqused_k": batch.seq_lens,
        "softmax_scale": batch.scale,
        "causal": True,
        "block_table": batch.block_table,
        "fa_version": 3,
    }
    return lambda: flash_attn_varlen_func(**arguments)
