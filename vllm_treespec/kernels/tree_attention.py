"""Attention of draft trees, chains and prompts over a paged KV cache, in Triton."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NoReturn

import torch
import triton
from torch import Tensor

from vllm_treespec.kernels.tree_attention_device import (
    merge_kernel,
    tree_attention_kernel,
)
from vllm_treespec.kernels.workspace import MAX_BLOCK_ROWS, Workspace

__all__ = ["BlockShape", "Inputs", "Launch", "Workspace", "tree_attention"]

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
FP8_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)
MAX_HEAD_SIZE = 256


def tree_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    output: Tensor,
    *,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    node_masks: Tensor,
    tree_starts: Tensor,
    max_query_len: int,
    scale: float,
    sliding_window: int = 0,
    soft_cap: float = 0.0,
    key_scale: Tensor | None = None,
    value_scale: Tensor | None = None,
    sinks: Tensor | None = None,
    workspace: Workspace,
) -> None:
    """Write the attention of a batch of tree nodes, chains and prompts to ``output``.

    A query row with mask 0 is causal: its position is the request's ``seq_len -
    query_len`` plus its index among the request's rows. A row with another mask is a
    tree node: it sees the keys before ``tree_start``, and the key at ``tree_start + j``
    if bit j is set; its own bit is its highest. Rows that see no key get zeros; rows
    of no request are left alone.

    One program takes all query heads of one kv head for as many rows of a request as
    its block holds: 128 tokens × heads. A tree with more (33 nodes and more at 4
    query heads a kv head) is read by several programs, which run at the same time and
    share the context in L2. The grid depends on shapes and ``max_query_len`` alone,
    and nothing is allocated: calls can be captured in CUDA graphs.

    Args:
        query: [num_tokens, num_heads, head_size], float16, bfloat16 or float32.
        key_cache: [num_blocks, page_size, num_kv_heads, head_size] of any strides but
            the last; of the query's dtype or fp8 (uint8: the bits of e4m3).
        value_cache: as ``key_cache``, with the same strides.
        output: as ``query``.
        query_start_loc: int32 [num_reqs + 1], first row of each request.
        seq_lens: int32 [num_reqs], keys in the cache, those of the rows included.
        block_table: int32 [num_reqs, max_blocks].
        node_masks: int64 [at least num_tokens], a row's ancestors and itself.
        tree_starts: int32 [at least num_reqs], position of node 0.
        max_query_len: no request has more rows.
        scale: factor of the scores, positive.
        sliding_window: a key is seen if it lies fewer positions back; 0: all are. A
            node's position is ``tree_start`` plus its depth. That of a row whose mask
            has later rows, too, is its slot's; its window must be longer than a mask.
        soft_cap: scores become ``soft_cap * tanh(score / soft_cap)``; 0: they stay.
        key_scale: float32, one element on the device, what fp8 keys are multiplied by.
        value_scale: likewise for values.
        sinks: floats [num_heads], scores of a key without a value that every row sees
            besides; neither scale nor cap apply to them.
        workspace: memory for contexts that are split.

    Raises:
        ValueError: inputs that the kernel does not take.

    """
    inputs = Inputs(
        query,
        key_cache,
        value_cache,
        output,
        query_start_loc,
        seq_lens,
        block_table,
        node_masks,
        tree_starts,
        max_query_len,
        scale,
        sliding_window,
        soft_cap,
        key_scale,
        value_scale,
        sinks,
        workspace,
    )
    inputs.check()
    for launch in inputs.launches():
        launch.run()


@dataclass(frozen=True)
class BlockShape:
    """Size of a q block and how its program runs."""

    # query rows (tokens × heads of a kv head) and keys that are multiplied at a time
    rows: int
    tile: int
    num_warps: int
    num_stages: int
    # programs on one multiprocessor at a time, by registers and shared memory
    per_processor: int


# By padded head size; found with the compile table: no shape spills on sm_90. Tiles
# and stages keep at least 32 KB of keys and values on their way per multiprocessor.
BLOCK_SHAPES: dict[int, tuple[BlockShape, ...]] = {
    64: (
        BlockShape(16, 64, 4, 4, 4),
        BlockShape(32, 64, 4, 3, 3),
        BlockShape(64, 64, 4, 3, 2),
        BlockShape(128, 64, 8, 3, 1),
    ),
    128: (
        BlockShape(16, 64, 4, 3, 3),
        BlockShape(32, 64, 4, 3, 2),
        BlockShape(64, 64, 4, 3, 2),
        BlockShape(128, 64, 8, 3, 1),
    ),
    256: (
        BlockShape(16, 32, 4, 3, 3),
        BlockShape(32, 32, 4, 3, 2),
        BlockShape(64, 32, 8, 3, 1),
        BlockShape(128, 32, 8, 3, 1),
    ),
}
# Products of float32 run on no tensor core: a block is bound by registers.
FLOAT32_SHAPES = tuple(BlockShape(rows, 32, 8, 2, 2) for rows in (16, 32, 64, 128))
FLOAT32_ROWS = 32


def block_shape(rows: int, group: int, head_pad: int, dtype: torch.dtype) -> BlockShape:
    """Shape of q blocks for requests of at most ``rows`` tokens × heads.

    ``group`` query heads share a kv head; a block holds all of them.
    """
    shapes, most = BLOCK_SHAPES[max(64, head_pad)], MAX_BLOCK_ROWS
    if dtype == torch.float32:
        shapes, most = FLOAT32_SHAPES, FLOAT32_ROWS
    wanted = max(group, min(rows, most))
    return next(shape for shape in shapes if shape.rows >= wanted)


def refuse(reason: str) -> NoReturn:
    """Raise ValueError."""
    raise ValueError(f"tree attention cannot take {reason}")


@dataclass(frozen=True)
class Launch:
    """A kernel with its grid and arguments."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: dict[str, Any]
    num_warps: int
    num_stages: int

    def run(self) -> None:
        """Launch the kernel."""
        self.kernel[self.grid](
            **self.arguments, num_warps=self.num_warps, num_stages=self.num_stages
        )


@dataclass
class Inputs:
    """Arguments of ``tree_attention``."""

    query: Tensor
    key_cache: Tensor
    value_cache: Tensor
    output: Tensor
    query_start_loc: Tensor
    seq_lens: Tensor
    block_table: Tensor
    node_masks: Tensor
    tree_starts: Tensor
    max_query_len: int
    scale: float
    sliding_window: int
    soft_cap: float
    key_scale: Tensor | None
    value_scale: Tensor | None
    sinks: Tensor | None
    workspace: Workspace

    def __post_init__(self) -> None:
        """Read the sizes, and uint8 caches as fp8."""
        if self.key_cache.dtype == torch.uint8:
            self.key_cache = self.key_cache.view(torch.float8_e4m3fn)
            self.value_cache = self.value_cache.view(torch.float8_e4m3fn)
        self.fp8 = self.key_cache.dtype in FP8_DTYPES
        self.num_tokens, self.num_heads, self.head_size = self.query.shape
        _, self.page_size, self.num_kv_heads, _ = self.key_cache.shape
        self.group = self.num_heads // self.num_kv_heads
        self.head_pad = triton.next_power_of_2(self.head_size)

    def check(self) -> None:
        """Raise ValueError for inputs that the kernel does not take."""
        query, keys, values = self.query, self.key_cache, self.value_cache
        if query.dtype not in DTYPES:
            refuse(f"queries of {query.dtype}; give one of {DTYPES}")
        if keys.dtype != query.dtype and not self.fp8:
            refuse(
                f"keys of {keys.dtype} for queries of {query.dtype}; "
                "give the queries' dtype or fp8"
            )
        if self.fp8 and (self.key_scale is None or self.value_scale is None):
            refuse("an fp8 KV cache without key_scale and value_scale; give both")
        if keys.dtype != values.dtype or keys.stride() != values.stride():
            refuse(
                "key_cache and value_cache that differ in dtype or strides; "
                "give the two halves of one tensor"
            )
        if (query.stride(2), self.output.stride(2), keys.stride(3)) != (1, 1, 1):
            refuse("heads with gaps; the last stride of query, output and caches is 1")
        if self.head_size > MAX_HEAD_SIZE:
            refuse(f"head size {self.head_size}; at most {MAX_HEAD_SIZE}")
        if self.num_heads % self.num_kv_heads or self.group > MAX_BLOCK_ROWS:
            refuse(
                f"{self.num_heads} query heads for {self.num_kv_heads} kv heads; "
                f"give a multiple, at most {MAX_BLOCK_ROWS}-fold"
            )
        if self.sinks is not None and (
            self.sinks.shape != (self.num_heads,) or not self.sinks.is_contiguous()
        ):
            refuse(
                f"sinks of shape {tuple(self.sinks.shape)} for {self.num_heads} query "
                f"heads; give one number a head, without gaps"
            )
        if self.node_masks.dtype != torch.int64:
            refuse(f"node_masks of {self.node_masks.dtype}; give int64")
        if self.scale <= 0:
            refuse(f"scale {self.scale}; give a positive number")

    def launches(self) -> list[Launch]:
        """The kernels of this call, in order; no rows, no kernels."""
        if not self.num_tokens:
            return []
        rows = self.max_query_len * self.group
        shape = block_shape(rows, self.group, self.head_pad, self.query.dtype)
        num_reqs = self.seq_lens.shape[0]
        block_q = shape.rows // self.group
        one_block = self.max_query_len <= block_q
        # Each request's last block may be partly filled, or empty.
        q_blocks = num_reqs if one_block else self.num_tokens // block_q + num_reqs
        longest = self.block_table.shape[1] * self.page_size
        splits = self.workspace.splits(
            q_blocks * self.num_kv_heads,
            self.num_tokens * self.num_heads,
            self.head_size,
            shape.per_processor,
            triton.cdiv(longest, 2 * shape.tile),
        )
        attention = Launch(
            tree_attention_kernel,
            (q_blocks, self.num_kv_heads, splits),
            self._arguments() | self._constants(shape, one_block, splits > 1),
            shape.num_warps,
            shape.num_stages,
        )
        return [attention] if splits == 1 else [attention, self._merge(splits)]

    def _arguments(self) -> dict[str, Any]:
        """Run-time arguments of the attention kernel."""
        return {
            "query": self.query,
            "key_cache": self.key_cache,
            "value_cache": self.value_cache,
            "output": self.output,
            "partials": self.workspace.partials,
            "partial_lse": self.workspace.partial_lse,
            "query_start_loc": self.query_start_loc,
            "seq_lens": self.seq_lens,
            "block_table": self.block_table,
            "node_masks": self.node_masks,
            "tree_starts": self.tree_starts,
            "sinks": self.sinks,
            "key_scale": self.key_scale if self.fp8 else None,
            "value_scale": self.value_scale if self.fp8 else None,
            "scale": float(self.scale),
            "soft_cap": float(self.soft_cap),
            "window": self.sliding_window,
            "num_reqs": self.seq_lens.shape[0],
            "query_stride": self.query.stride(0),
            "query_head_stride": self.query.stride(1),
            "output_stride": self.output.stride(0),
            "output_head_stride": self.output.stride(1),
            "block_stride": self.key_cache.stride(0),
            "slot_stride": self.key_cache.stride(1),
            "kv_head_stride": self.key_cache.stride(2),
            "table_stride": self.block_table.stride(0),
        }

    def _constants(
        self, shape: BlockShape, one_block: bool, split: bool
    ) -> dict[str, Any]:
        """Compile-time arguments of the attention kernel."""
        return {
            "ONE_BLOCK": one_block,
            "SPLIT": split,
            "WINDOW": self.sliding_window > 0,
            "SOFT_CAP": self.soft_cap > 0,
            "SINKS": self.sinks is not None,
            "FP8": self.fp8,
            "GROUP": self.group,
            "HEAD_SIZE": self.head_size,
            "HEAD_PAD": self.head_pad,
            "PAGE_SIZE": self.page_size,
            "BLOCK_M": shape.rows,
            "TILE": shape.tile,
        }

    def _merge(self, splits: int) -> Launch:
        """The kernel that joins the splits' outputs."""
        arguments = {
            "partials": self.workspace.partials,
            "partial_lse": self.workspace.partial_lse,
            "output": self.output,
            "query_start_loc": self.query_start_loc,
            "num_reqs": self.seq_lens.shape[0],
            "num_splits": splits,
            "output_stride": self.output.stride(0),
            "output_head_stride": self.output.stride(1),
            "HEAD_SIZE": self.head_size,
            "HEAD_PAD": self.head_pad,
        }
        grid = (self.num_tokens, self.num_heads)
        return Launch(merge_kernel, grid, arguments, num_warps=4, num_stages=1)
