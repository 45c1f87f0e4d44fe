"""Commit on a GPU: the accepted nodes' keys and values move together, in one launch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

# Words that one program moves at a time.
MAX_BLOCK = 1024
NUM_WARPS = 4


@triton.jit(
    do_not_specialize=["path_stride", "table_stride"],
    do_not_specialize_on_alignment=[
        "path",
        "num_accepted",
        "tree_starts",
        "block_table",
    ],
)
def move_kernel(
    layers,  # int64 [num_layers], addresses of the layers' caches
    path,
    path_stride,
    num_accepted,
    tree_starts,
    block_table,
    table_stride,
    block_stride,  # in words, as are the two below
    head_stride,
    token_stride,
    PAGE_SIZE: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    HEAD_WORDS: tl.constexpr,
    WORD_BYTES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Move some words of one layer's rows of one tree.

    In ascending order no row is overwritten before it was read: node path[d] lies at
    place d + 1 or behind it, and later ones behind that.
    """
    tree = tl.program_id(1)
    words = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    inside = words < NUM_HEADS * HEAD_WORDS
    address = tl.load(layers + tl.program_id(0))
    if WORD_BYTES == 8:
        cache = address.to(tl.pointer_type(tl.int64))
    elif WORD_BYTES == 4:
        cache = address.to(tl.pointer_type(tl.int32))
    elif WORD_BYTES == 2:
        cache = address.to(tl.pointer_type(tl.int16))
    else:
        cache = address.to(tl.pointer_type(tl.int8))
    head = (words // HEAD_WORDS).to(tl.int64)
    cache += head * head_stride + words % HEAD_WORDS
    start = tl.load(tree_starts + tree)
    blocks = block_table + tree * table_stride
    for d in range(tl.load(num_accepted + tree)):
        source = start + tl.load(path + tree * path_stride + d)
        goal = start + d + 1
        if source != goal:
            source_block = tl.load(blocks + source // PAGE_SIZE).to(tl.int64)
            goal_block = tl.load(blocks + goal // PAGE_SIZE).to(tl.int64)
            source_row = source_block * block_stride + source % PAGE_SIZE * token_stride
            goal_row = goal_block * block_stride + goal % PAGE_SIZE * token_stride
            row = tl.load(cache + source_row, mask=inside)
            tl.store(cache + goal_row, row, mask=inside)


class KvMover:
    """Moves the accepted nodes' rows of all layers' caches; made once.

    The caches are read and written where they lay when it was made.
    """

    def __init__(self, kv_caches: Sequence[Tensor], block_size: int) -> None:
        """Note where the caches lie.

        Args:
            kv_caches: per layer, [num_blocks, num_kv_heads, block_size, 2 * head_size]
                in any order in memory, but the last axis contiguous. One that several
                layers share counts once.
            block_size: tokens in a block.

        Raises:
            ValueError: when there is none, they differ in shape, order or dtype, or
                do not have such a layout.

        """
        check_same_layout(kv_caches, block_size)
        first = kv_caches[0]
        addresses = list(dict.fromkeys(cache.data_ptr() for cache in kv_caches))
        self.block_size = block_size
        self.num_heads = first.shape[1]
        item = first.element_size()
        strides = [stride * item for stride in first.stride()[:3]]
        row = first.shape[3] * item
        self.word_bytes = next(
            size
            for size in (8, 4, 2, 1)
            if all(place % size == 0 for place in [*addresses, *strides, row])
        )
        self.strides = [stride // self.word_bytes for stride in strides]
        self.head_words = row // self.word_bytes
        self.layers = torch.tensor(addresses, dtype=torch.int64, device=first.device)
        # The table of addresses keeps no memory alive.
        self.kv_caches = list(kv_caches)

    def move(
        self,
        path: Tensor,
        num_accepted: Tensor,
        tree_starts: Tensor,
        block_table: Tensor,
    ) -> None:
        """Move each accepted node's row to the place behind the one before it.

        Before: node i of a tree lies at position tree_start + i. After: the accepted
        nodes lie at tree_start + 1, + 2, ... in order; behind them lies anything.

        Args:
            path: int64 [num_trees, max_depth], accepted nodes from the top.
            num_accepted: int64 [num_trees].
            tree_starts: int64 [num_trees], positions of the roots.
            block_table: int32 [num_trees, max_blocks].

        """
        if not len(path):
            return
        total = self.num_heads * self.head_words
        block = block_of(total)
        grid = (len(self.layers), len(path), triton.cdiv(total, block))
        block_stride, head_stride, token_stride = self.strides
        move_kernel[grid](
            self.layers,
            path,
            path.stride(0),
            num_accepted,
            tree_starts,
            block_table,
            block_table.stride(0),
            block_stride,
            head_stride,
            token_stride,
            PAGE_SIZE=self.block_size,
            NUM_HEADS=self.num_heads,
            HEAD_WORDS=self.head_words,
            WORD_BYTES=self.word_bytes,
            BLOCK=block,
            num_warps=NUM_WARPS,
        )


def check_same_layout(kv_caches: Sequence[Tensor], block_size: int) -> None:
    """Raise ValueError unless the caches have one layout that can be moved."""
    if not kv_caches:
        raise ValueError("no KV cache to move; a model has at least one layer")
    layouts = {(c.shape, c.stride(), c.dtype, c.device) for c in kv_caches}
    if len(layouts) > 1:
        raise ValueError(
            f"KV caches of {len(layouts)} layouts; use one KvMover for each layout"
        )
    first = kv_caches[0]
    if first.dim() != 4 or first.shape[2] != block_size or first.stride(3) != 1:
        raise ValueError(
            f"a KV cache of shape {list(first.shape)} and strides "
            f"{list(first.stride())}; expected [num_blocks, num_kv_heads, "
            f"{block_size}, 2 * head_size] with a contiguous last axis"
        )


def compile_cases() -> list[tuple[str, Any, dict[str, str], dict[str, int], int]]:
    """Forms of the kernel worth compiling ahead of time.

    Returns:
        name, kernel, types of its arguments, values of its constants, and warps.

    """
    signature = {
        "layers": "*i64",
        "path": "*i64",
        "path_stride": "i32",
        "num_accepted": "*i64",
        "tree_starts": "*i64",
        "block_table": "*i32",
        "table_stride": "i32",
        "block_stride": "i32",
        "head_stride": "i32",
        "token_stride": "i32",
    }
    cases = []
    for heads, head_bytes in ((8, 512), (3, 256), (8, 256), (1, 512), (32, 160)):
        words = head_bytes // 8
        constants = {
            "PAGE_SIZE": 16,
            "NUM_HEADS": heads,
            "HEAD_WORDS": words,
            "WORD_BYTES": 8,
            "BLOCK": block_of(heads * words),
        }
        name = f"kv_move {heads} heads of {head_bytes} bytes"
        cases.append((name, move_kernel, signature, constants, NUM_WARPS))
    return cases


def block_of(words: int) -> int:
    """Words that one program moves, of those in a row of all heads."""
    return min(triton.next_power_of_2(words), MAX_BLOCK)
