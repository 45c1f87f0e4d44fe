"""Random paged batches of draft trees, and attention over them in float64."""

from __future__ import annotations

import random
from dataclasses import dataclass
from math import ceil

import torch
from torch import Tensor

from benchmarks.gpu.shapes import SHAPES


@dataclass(frozen=True)
class Heads:
    """The attention shape of a layer."""

    num_heads: int
    num_kv_heads: int
    head_size: int

    @classmethod
    def of(cls, shape: str) -> Heads:
        """Attention shape of a model shape."""
        sizes = SHAPES[shape]
        return cls(sizes.num_attention_heads, sizes.num_key_value_heads, sizes.head_dim)


@dataclass(frozen=True)
class Case:
    """One cell of the kernel table."""

    shape: str
    nodes: int
    context: int
    batch: int

    @property
    def name(self) -> str:
        """Name of its file."""
        return f"{self.shape}-b{self.batch}-n{self.nodes}-c{self.context}"


@dataclass(frozen=True)
class Paging:
    """How the KV cache lies in memory."""

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
    heads: Heads
    # [num_tokens, num_heads, head_size]
    query: Tensor
    # [num_blocks, page_size, num_kv_heads, head_size], two parts of one tensor
    key_cache: Tensor
    value_cache: Tensor
    # int32 [num_reqs + 1], [num_reqs], [num_reqs, max_blocks], [num_reqs]
    query_start_loc: Tensor
    seq_lens: Tensor
    block_table: Tensor
    tree_starts: Tensor
    # int64 [num_tokens]
    node_masks: Tensor

    @property
    def scale(self) -> float:
        """Scale of the scores."""
        return float(self.heads.head_size**-0.5)

    @property
    def kv_bytes(self) -> int:
        """Bytes of keys and values that a kernel has to read once."""
        tokens = self.case.batch * (self.case.context + self.case.nodes)
        per_token = 2 * self.heads.num_kv_heads * self.heads.head_size
        return tokens * per_token * self.query.element_size()


def random_parents(num_nodes: int, rng: random.Random) -> list[int]:
    """Parents of a random tree: each node hangs below any node before it."""
    return [-1, *(rng.randrange(node) for node in range(1, num_nodes))]


def masks_of(parents: list[int]) -> list[int]:
    """Ancestor masks of a tree's nodes as signed 64-bit numbers, own bit included."""
    masks: list[int] = []
    for node, parent in enumerate(parents):
        above = masks[parent] if parent >= 0 else 0
        masks.append(above | 1 << node)
    return [mask - 2**64 if mask >= 2**63 else mask for mask in masks]


def make_batch(
    case: Case, dtype: torch.dtype, device: str, paging: Paging, seed: int = 0
) -> Batch:
    """Make a batch with standard normal queries, keys and values.

    Args:
        case: what the batch holds.
        dtype: of queries and cache.
        device: where it lies.
        paging: of the cache; a request's blocks lie in random places, and its row of
            the block table is at least as wide as it needs.
        seed: of everything random.

    """
    heads = Heads.of(case.shape)
    generator = torch.Generator(device=device).manual_seed(seed)
    rng = random.Random(seed)
    seq_len = case.context + case.nodes
    blocks_each = ceil(seq_len / paging.page_size)
    num_blocks = case.batch * blocks_each
    nhd = (num_blocks, paging.page_size, heads.num_kv_heads, 2 * heads.head_size)
    hnd = (num_blocks, heads.num_kv_heads, paging.page_size, 2 * heads.head_size)
    shape = nhd if paging.layout == "nhd" else hnd
    cache = torch.randn(shape, generator=generator, device=device, dtype=dtype)
    if paging.layout == "hnd":
        cache = cache.transpose(1, 2)
    key_cache, value_cache = cache.split(heads.head_size, dim=-1)
    num_tokens = case.batch * case.nodes
    masks = [
        mask
        for _ in range(case.batch)
        for mask in masks_of(random_parents(case.nodes, rng))
    ]
    places = torch.randperm(num_blocks, generator=generator, device=device)
    columns = max(blocks_each, ceil(paging.max_model_len / paging.page_size))
    table = torch.nn.functional.pad(
        places.view(case.batch, blocks_each), (0, columns - blocks_each)
    )

    def int32(values: Tensor) -> Tensor:
        return values.to(device=device, dtype=torch.int32)

    return Batch(
        case=case,
        heads=heads,
        query=torch.randn(
            (num_tokens, heads.num_heads, heads.head_size),
            generator=generator,
            device=device,
            dtype=dtype,
        ),
        key_cache=key_cache,
        value_cache=value_cache,
        query_start_loc=int32(torch.arange(case.batch + 1) * case.nodes),
        seq_lens=int32(torch.full((case.batch,), seq_len)),
        block_table=int32(table),
        tree_starts=int32(torch.full((case.batch,), case.context)),
        node_masks=torch.tensor(masks, dtype=torch.int64, device=device),
    )


def visible(batch: Batch, request: int, tree: bool) -> Tensor:
    """Which keys a request's rows see, bool [nodes, context + nodes]."""
    nodes, context = batch.case.nodes, batch.case.context
    columns = torch.arange(nodes, device=batch.query.device)
    if tree:
        masks = batch.node_masks[request * nodes : (request + 1) * nodes]
        own = (masks[:, None] >> columns) & 1 == 1
    else:
        own = columns <= columns[:, None]
    return torch.nn.functional.pad(own, (context, 0), value=True)


def reference(batch: Batch, request: int, tree: bool) -> Tensor:
    """Attention of one request in float64, [nodes, num_heads, head_size].

    Args:
        batch: of which the request is one.
        request: its index.
        tree: rows see their ancestors; else each row sees what lies before it.

    """
    nodes, seq_len = batch.case.nodes, batch.case.context + batch.case.nodes
    group = batch.heads.num_heads // batch.heads.num_kv_heads
    blocks = batch.block_table[request].long()

    def gathered(cache: Tensor) -> Tensor:
        rows = cache[blocks[: ceil(seq_len / cache.shape[1])]].flatten(0, 1)
        rows = rows[:seq_len].double()
        return rows.transpose(0, 1).repeat_interleave(group, dim=0)

    query = batch.query[request * nodes : (request + 1) * nodes].double()
    scores = query.transpose(0, 1) @ gathered(batch.key_cache).transpose(1, 2)
    seen = visible(batch, request, tree)
    weights = (scores * batch.scale).masked_fill(~seen, -torch.inf).softmax(dim=-1)
    return (weights @ gathered(batch.value_cache)).transpose(0, 1)


def relative_error(batch: Batch, output: Tensor, tree: bool) -> float:
    """Largest error of the first and the last request, over the largest true value.

    Args:
        batch: what was computed.
        output: [num_tokens, num_heads, head_size].
        tree: whether the rows were a tree's.

    """
    nodes = batch.case.nodes
    error = size = 0.0
    for request in {0, batch.case.batch - 1}:
        true = reference(batch, request, tree)
        found = output[request * nodes : (request + 1) * nodes].double()
        # a NaN is an error, which max() would pass over
        off = (found - true).abs().nan_to_num(nan=torch.inf)
        error = max(error, float(off.max()))
        size = max(size, float(true.abs().max()))
    return error / size
