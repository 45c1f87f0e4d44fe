"""Random paged batches of trees, and attention over them: each kernel, and float64."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from math import ceil
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from benchmarks.gpu.shapes import SHAPES
from vllm_treespec.trees.builders import from_parents
from vllm_treespec.trees.tree import MAX_NODES, TreeBatch, ancestor_bits, ancestor_mask

Call = Callable[[], Any]
# Ours on a random tree and on a causal chain (mask 0), vLLM's Triton unified attention
# and FlashAttention 3 on a causal chain; as many query tokens each.
TREE, CHAIN, STOCK, FA3 = SIDES = ("tree", "chain", "stock-triton", "fa3")
# As in vLLM's Triton backend.
SEGMENTS = 16
MIN_LAUNCH_GRID = 128
MAX_SPLIT_QUERY_LEN = 8


@dataclass(frozen=True)
class Case:
    """One cell of the kernel table, and how its KV cache lies in memory."""

    shape: str
    nodes: int
    context: int
    batch: int
    page_size: int
    # "nhd": positions before heads; "hnd": heads before positions
    layout: str
    # positions that a row of the block table has room for, as in an engine with this
    # max_model_len; kernels that split a context may size their grid by it
    max_model_len: int


@dataclass(frozen=True)
class Batch:
    """Queries of one tree per request, and a KV cache that holds context and trees."""

    case: Case
    tree: TreeBatch
    # [num_tokens, num_heads, head_size]
    query: Tensor
    # [num_blocks, page_size, num_kv_heads, head_size], two parts of one tensor
    key_cache: Tensor
    value_cache: Tensor
    # the other tensors of ``tree_attention``, by its names
    metadata: dict[str, Tensor]

    @property
    def kv_bytes(self) -> int:
        """Bytes of keys and values that a kernel has to read once."""
        tokens = self.case.batch * (self.case.context + self.case.nodes)
        return tokens * 2 * self.key_cache[0, 0].numel() * self.query.element_size()


def make_batch(case: Case, dtype: torch.dtype, device: str) -> Batch:
    """Make a batch with standard normal queries, keys and values, and random trees.

    A request's blocks lie in random places; its row of the block table is at least as
    wide as it needs.
    """
    nodes, context, batch = case.nodes, case.context, case.batch
    heads = SHAPES[case.shape]
    rng, generator = random.Random(0), torch.Generator(device).manual_seed(0)
    # each node hangs below any node before it
    parents = [
        [-1, *sorted(rng.randrange(node) for node in range(1, nodes))]
        for _ in range(batch)
    ]
    tree = from_parents([[0] * nodes] * batch, parents)
    blocks_each = ceil((context + nodes) / case.page_size)
    columns = max(blocks_each, ceil(case.max_model_len / case.page_size))
    places = torch.randperm(batch * blocks_each, generator=generator, device=device)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device, dtype=dtype)

    hnd = case.layout == "hnd"
    inner = [case.page_size, heads.num_key_value_heads]
    cache = normal(len(places), *(inner[::-1] if hnd else inner), 2 * heads.head_dim)
    keys, values = (cache.transpose(1, 2) if hnd else cache).chunk(2, dim=-1)
    metadata = {
        "query_start_loc": torch.arange(batch + 1).int() * nodes,
        "seq_lens": torch.full((batch,), context + nodes).int(),
        "block_table": pad(places.view(batch, -1), (0, columns - blocks_each)).int(),
        "tree_starts": torch.full((batch,), context).int(),
        "node_masks": ancestor_bits(tree, MAX_NODES).flatten(),
    }
    return Batch(
        case=case,
        tree=tree,
        query=normal(batch * nodes, heads.num_attention_heads, heads.head_dim),
        key_cache=keys,
        value_cache=values,
        metadata={name: values.to(device) for name, values in metadata.items()},
    )


def reference(batch: Batch, request: int, tree: bool) -> Tensor:
    """Attention of one request in float64, [nodes, num_heads, head_size].

    With ``tree``, rows see their ancestors; else each row sees what lies before it.
    """
    nodes, context = batch.case.nodes, batch.case.context
    chain = torch.ones(nodes, nodes, dtype=torch.bool).tril()
    mask = ancestor_mask(batch.tree)[request] if tree else chain
    blocks = batch.metadata["block_table"][request].long()

    def gathered(cache: Tensor) -> Tensor:
        rows = cache[blocks[: ceil((context + nodes) / cache.shape[1])]].flatten(0, 1)
        return rows[: context + nodes].double().transpose(0, 1)[None]

    query = batch.query[request * nodes : (request + 1) * nodes].double()
    (attended,) = scaled_dot_product_attention(
        query.transpose(0, 1)[None],
        gathered(batch.key_cache),
        gathered(batch.value_cache),
        attn_mask=pad(mask, (context, 0), value=True).to(query.device),
        enable_gqa=True,
    )
    return attended.transpose(0, 1)


def relative_error(batch: Batch, output: Tensor, tree: bool) -> float:
    """Largest error of the first and the last request, over the largest true value.

    ``output`` is [num_tokens, num_heads, head_size], of a tree's rows or a chain's.
    """
    outputs = output.double().split(batch.case.nodes)
    checked = [0, batch.case.batch - 1]
    true = torch.stack([reference(batch, request, tree) for request in checked])
    error = torch.stack([outputs[request] for request in checked]) - true
    # a NaN is an error as large as can be
    return float(error.abs().nan_to_num(nan=torch.inf).max() / true.abs().max())


def our_calls(batch: Batch, output: Tensor) -> dict[str, Call]:
    """Our kernel, on trees and on chains; the calls write into ``output``."""
    from vllm_treespec.kernels.tree_attention import Workspace, tree_attention

    num_tokens, num_heads, head_size = batch.query.shape
    workspace = Workspace(num_tokens, num_heads, head_size, batch.query.device)

    def call_with(metadata: dict[str, Any]) -> Call:
        return lambda: tree_attention(
            batch.query,
            batch.key_cache,
            batch.value_cache,
            output,
            **metadata,
            max_query_len=batch.case.nodes,
            scale=head_size**-0.5,
            workspace=workspace,
        )

    causal = torch.zeros_like(batch.metadata["node_masks"])
    return {
        TREE: call_with(batch.metadata),
        CHAIN: call_with(batch.metadata | {"node_masks": causal}),
    }


def stock_calls(batch: Batch, output: Tensor) -> tuple[dict[str, Call], dict[str, str]]:
    """Stock kernels on chains, and why the others are missing on this machine."""
    calls, missing = {}, {}
    for name, make in {STOCK: stock_triton, FA3: flash_attention}.items():
        try:
            call = make(batch, output)
            call()
            # waits, so that what fails on the card fails here
            output.flatten()[0].item()
            calls[name] = call
        except (ImportError, RuntimeError) as error:
            missing[name] = f"{type(error).__name__}: {error}".splitlines()[0]
    return calls, missing


def stock_arguments(batch: Batch, output: Tensor) -> dict[str, Any]:
    """What both stock kernels take."""
    return {
        "q": batch.query,
        "k": batch.key_cache,
        "v": batch.value_cache,
        "out": output,
        "cu_seqlens_q": batch.metadata["query_start_loc"],
        "max_seqlen_q": batch.case.nodes,
        "seqused_k": batch.metadata["seq_lens"],
        "max_seqlen_k": batch.case.context + batch.case.nodes,
        "softmax_scale": batch.query.shape[2] ** -0.5,
        "causal": True,
        "block_table": batch.metadata["block_table"],
    }


def stock_triton(batch: Batch, output: Tensor) -> Call:
    """vLLM's causal kernel, called as its Triton backend calls it."""
    from vllm.v1.attention.ops.triton_unified_attention import unified_attention

    _, num_heads, head_size = batch.query.shape
    num_kv_heads = batch.key_cache.shape[2]
    threshold = MIN_LAUNCH_GRID // num_kv_heads
    rows = threshold * min(batch.case.nodes, MAX_SPLIT_QUERY_LEN)
    # float32
    segments = torch.empty((rows, num_heads, SEGMENTS), device=batch.query.device)
    padded_head = 1 << (head_size - 1).bit_length()
    scales = segments.new_ones((batch.case.batch, num_kv_heads))
    arguments = stock_arguments(batch, output) | {
        "window_size": (-1, -1),
        "softcap": 0,
        "q_descale": None,
        "k_descale": scales,
        "v_descale": scales,
        "seq_threshold_3D": threshold,
        "num_par_softmax_segments": SEGMENTS,
        "softmax_segm_output": segments.new_empty((*segments.shape, padded_head)),
        "softmax_segm_max": segments,
        "softmax_segm_expsum": torch.empty_like(segments),
    }
    return lambda: unified_attention(**arguments)


def flash_attention(batch: Batch, output: Tensor) -> Call:
    """FlashAttention 3 as vLLM brings it; RuntimeError where it is not supported."""
    from vllm import vllm_flash_attn as flash

    if not flash.is_fa_version_supported(3):
        raise RuntimeError(flash.fa_version_unsupported_reason(3))
    arguments = stock_arguments(batch, output) | {"fa_version": 3}
    return lambda: flash.flash_attn_varlen_func(**arguments)
