"""Tree attention in float64, from positions and sets of ancestors, and its batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Request:
    """One request of a batch.

    A chain has ``num_queries`` query rows behind ``context`` keys. A tree has the
    nodes of ``parents`` behind ``context`` keys; its query rows are those of ``nodes``
    (all of them if None). A block is a chain whose rows see its later rows, too. A
    padded request has no rows.
    """

    context: int
    num_queries: int = 0
    # parents of the tree's nodes, -1 at the root
    parents: tuple[int, ...] | None = None
    nodes: tuple[int, ...] | None = None
    is_block: bool = False

    @property
    def rows(self) -> tuple[int | None, ...]:
        """Node of each query row, None in a chain."""
        if self.parents is None:
            return (None,) * self.num_queries
        return self.nodes or tuple(range(len(self.parents)))

    @property
    def seq_len(self) -> int:
        """Keys in the cache."""
        if self.parents is None:
            return self.context + self.num_queries
        return self.context + max(self.rows) + 1  # type: ignore[type-var, operator]


@dataclass
class Batch:
    """Inputs of the kernel, by its names, and the requests they were made of."""

    requests: Sequence[Request]
    query: Tensor
    key_cache: Tensor
    value_cache: Tensor
    metadata: dict[str, Tensor]
    key_scale: Tensor | None = None
    value_scale: Tensor | None = None


def ancestors(parents: Sequence[int], node: int) -> list[int]:
    """The nodes from the given one up to the root."""
    path = [node]
    while parents[path[-1]] >= 0:
        path.append(parents[path[-1]])
    return path


def mask_bits(nodes: Sequence[int]) -> int:
    """The int64 whose bits are the given nodes."""
    bits = sum(1 << node for node in nodes)
    return bits - (1 << 64) if bits >= 1 << 63 else bits


def visible_keys(request: Request, row: int, window: int) -> list[int]:
    """Slots of the keys that a query row sees, by position and ancestry."""
    node = request.rows[row]
    if node is None:
        position = request.context + row
        last = request.seq_len if request.is_block else position + 1
        positions = {slot: slot for slot in range(last)}
    else:
        assert request.parents is not None
        path = ancestors(request.parents, node)
        position = request.context + len(path) - 1
        positions = {slot: slot for slot in range(request.context)}
        for step, ancestor in enumerate(path):
            positions[request.context + ancestor] = position - step
    return [s for s, p in positions.items() if not window or position - p < window]


def reference(
    batch: Batch,
    scale: float,
    window: int = 0,
    soft_cap: float = 0.0,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention of the requests' rows, float64 [num_rows, num_heads, head_size]."""
    query = batch.query.double()
    group = query.shape[1] // batch.key_cache.shape[2]
    output = torch.zeros_like(query[: int(batch.metadata["query_start_loc"][-1])])
    token = 0
    for number, request in enumerate(batch.requests):
        keys, values = _request_cache(batch, number, request.seq_len)
        for row in range(len(request.rows)):
            slots = visible_keys(request, row, window)
            k = keys[slots].repeat_interleave(group, 1)
            v = values[slots].repeat_interleave(group, 1)
            scores = torch.einsum("hd,khd->hk", query[token], k) * scale
            if soft_cap:
                scores = soft_cap * torch.tanh(scores / soft_cap)
            if sinks is not None:
                scores = torch.cat([scores, sinks.double()[:, None]], 1)
            weights = scores.softmax(-1)[:, : len(slots)]
            output[token] = torch.einsum("hk,khd->hd", weights, v)
            token += 1
    return output


def _request_cache(batch: Batch, number: int, seq_len: int) -> tuple[Tensor, Tensor]:
    """Keys and values of one request, float64 [seq_len, num_kv_heads, head_size]."""
    slots = torch.arange(seq_len)
    page_size = batch.key_cache.shape[1]
    blocks = batch.metadata["block_table"][number, slots // page_size].long()
    dense = []
    for cache, scale in (
        (batch.key_cache, batch.key_scale),
        (batch.value_cache, batch.value_scale),
    ):
        rows = cache.float()[blocks, slots % page_size].double()
        dense.append(rows if scale is None else rows * scale.double())
    return dense[0], dense[1]


@dataclass(frozen=True)
class Layout:
    """Sizes and memory layout of a batch's tensors."""

    num_kv_heads: int = 1
    group: int = 2
    head_size: int = 64
    page_size: int = 16
    dtype: torch.dtype = torch.float32
    cache_dtype: torch.dtype | None = None
    # physical order of a page: heads outside (True) or slots outside
    heads_first: bool = True
    # rows behind the last request's, as a padded batch has
    padding: int = 0


def make_batch(requests: Sequence[Request], layout: Layout, seed: int = 0) -> Batch:
    """A batch of random queries, keys and values.

    Blocks are handed out in random order; slots that no request owns hold NaN, as do
    those behind a request's last key: reading them shows.
    """
    generator = torch.Generator().manual_seed(seed)
    key_cache, value_cache, block_table = _paged_cache(requests, layout, generator)
    lengths = torch.tensor([len(request.rows) for request in requests])
    starts = torch.zeros(len(requests) + 1, dtype=torch.int32)
    starts[1:] = lengths.cumsum(0)
    num_tokens = int(starts[-1]) + layout.padding
    num_heads = layout.num_kv_heads * layout.group
    # A token stride of its own, as rows of a fused projection have.
    wide = torch.randn(num_tokens, num_heads + 2, layout.head_size, generator=generator)
    masks = [
        _chain_mask(request)
        if node is None
        else mask_bits(ancestors(request.parents or (), node))
        for request in requests
        for node in request.rows
    ]
    masks += [3] * layout.padding
    tree_starts = [
        r.context - 1 if r.is_block else 0 if r.parents is None else r.context
        for r in requests
    ]
    scales = (None, None)
    if layout.cache_dtype is not None:
        scales = (torch.tensor(0.7), torch.tensor([1.3]))  # type: ignore[assignment]
    return Batch(
        requests,
        wide.to(layout.dtype)[:, 1:-1],
        key_cache,
        value_cache,
        {
            "query_start_loc": starts,
            "seq_lens": torch.tensor([r.seq_len for r in requests], dtype=torch.int32),
            "block_table": block_table,
            "node_masks": torch.tensor(masks, dtype=torch.int64),
            "tree_starts": torch.tensor(tree_starts, dtype=torch.int32),
        },
        *scales,
    )


def _chain_mask(request: Request) -> int:
    """A block's bit 0 is the last token before it."""
    if not request.is_block:
        return 0
    return mask_bits(range(request.num_queries + 1))


def _paged_cache(
    requests: Sequence[Request], layout: Layout, generator: torch.Generator
) -> tuple[Tensor, Tensor, Tensor]:
    """Key cache, value cache and block table of a batch."""
    page, heads = layout.page_size, layout.num_kv_heads
    needed = [-(-request.seq_len // page) for request in requests]
    num_blocks = sum(needed) + 3
    order = torch.randperm(num_blocks, generator=generator).tolist()
    # Columns that no key needs name a block that no request owns.
    size = len(requests), max(needed) + 1
    table = torch.full(size, order.pop(), dtype=torch.int32)
    pages = torch.full((num_blocks, page, heads, 2 * layout.head_size), torch.nan)
    for number, request in enumerate(requests):
        for column in range(needed[number]):
            block = order.pop()
            table[number, column] = block
            used = min(page, request.seq_len - column * page)
            shape = (used, heads, 2 * layout.head_size)
            pages[block, :used] = torch.randn(shape, generator=generator)
    pages = pages.to(layout.cache_dtype or layout.dtype)
    if layout.heads_first:
        pages = pages.transpose(1, 2).contiguous().transpose(1, 2)
    keys, values = pages.split(layout.head_size, -1)
    return keys, values, table
