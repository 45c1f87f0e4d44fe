"""Device code of tree attention: one pass over a request's keys, and the merge.

A *q block* is ``BLOCK_M`` rows: the query heads of one kv head for ``BLOCK_M // GROUP``
query tokens of one request. Scores are kept in base 2: softmax is ``exp2`` of scores
that were multiplied by ``scale * log2(e)``.
"""

# Triton reads the parameters' annotations: constexpr or nothing.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl

from vllm_treespec.kernels.workspace import MAX_SPLITS

# Splits of a context get at least this many tiles: the loads of two tiles are in
# flight together, so a shorter split would not be faster.
MIN_TILES_PER_SPLIT = tl.constexpr(2)
SPLITS = tl.constexpr(MAX_SPLITS)
# Partial outputs that the merge reads at a time.
MERGE_CHUNK = tl.constexpr(16)
LOG2_E = tl.constexpr(1.4426950408889634)
NO_LIMIT = tl.constexpr(2**31 - 1)


@triton.jit
def _bit_count(bits):
    """Number of set bits of uint64 values, int32."""
    bits = bits - ((bits >> 1) & 0x5555555555555555)
    bits = (bits & 0x3333333333333333) + ((bits >> 2) & 0x3333333333333333)
    bits = (bits + (bits >> 4)) & 0x0F0F0F0F0F0F0F0F
    return ((bits * 0x0101010101010101) >> 56).to(tl.int32)


@triton.jit
def _find_request(query_start_loc, q_block, num_reqs, BLOCK_Q: tl.constexpr):
    """Request of a q block; those of request r start at start of r // BLOCK_Q + r."""
    low = 0
    high = num_reqs - 1
    while low < high:
        middle = (low + high + 1) // 2
        first_block = tl.load(query_start_loc + middle) // BLOCK_Q + middle
        if first_block <= q_block:
            low = middle
        else:
            high = middle - 1
    return low


@triton.jit
def _visible(
    keys, masks, prefix, position, tree_start, seq_len, window, WINDOW: tl.constexpr
):
    """Which of the keys each row sees, bool [BLOCK_M, TILE]."""
    node = keys - tree_start
    is_node = (node >= 0) & (node < 64) & (keys < seq_len)
    # From here on bit 0 of a row's mask is the key's own bit.
    above = masks[:, None] >> tl.minimum(tl.maximum(node, 0), 63).to(tl.uint64)[None, :]
    in_prefix = keys[None, :] < prefix[:, None]
    visible = in_prefix | (is_node[None, :] & ((above & 1) != 0))
    if WINDOW:
        # The row's own bit is its highest: an ancestor's distance is in between.
        distance = tl.where(
            in_prefix, position[:, None] - keys[None, :], _bit_count(above >> 1)
        )
        visible = visible & (distance < window)
    return visible


@triton.jit
def _blocks(block_table, tile, seq_len, PAGE_SIZE: tl.constexpr, TILE: tl.constexpr):
    """Block numbers of a tile's keys: one if they share a block, else [TILE]."""
    keys = tile * TILE
    if PAGE_SIZE % TILE != 0:
        keys += tl.arange(0, TILE)
    return tl.load(block_table + keys // PAGE_SIZE, mask=keys < seq_len, other=0)


@triton.jit
def _places(
    blocks, tile, block_stride, slot_stride, PAGE_SIZE: tl.constexpr, TILE: tl.constexpr
):
    """Offsets of a tile's keys in the cache, int64 [TILE]."""
    columns = tl.arange(0, TILE)
    if PAGE_SIZE % TILE == 0:
        slots = tile * TILE % PAGE_SIZE + columns
    else:
        slots = (tile * TILE + columns) % PAGE_SIZE
    return blocks.to(tl.int64) * block_stride + slots * slot_stride


@triton.jit
def _without_keys(
    sinks, head, BLOCK_M: tl.constexpr, GROUP: tl.constexpr, SINKS: tl.constexpr
):
    """Maxima and weights of rows that saw no key yet; sinks count in one split."""
    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    if SINKS:
        first = tl.program_id(2) == 0
        sink = tl.load(sinks + head + tl.arange(0, BLOCK_M) % GROUP)
        row_max = tl.where(first, sink.to(tl.float32) * LOG2_E, row_max)
        row_sum += tl.where(first, 1.0, 0.0)
    return row_max, row_sum


@triton.jit
def _attend(
    q, row_max, row_sum, first_tile, last_tile, full_tile, full_end,
    key_cache, value_cache, block_table, block_stride, slot_stride,
    masks, prefix, position, tree_start, seq_len, window, scale, soft_cap,
    WINDOW: tl.constexpr, SOFT_CAP: tl.constexpr, HEAD_SIZE: tl.constexpr,
    PAGE_SIZE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Softmax-weighted sum of a range of tiles: sums, maxima and weights of the rows.

    Tiles from ``full_tile`` up to ``full_end`` are seen by all rows and need no mask.
    Block numbers are read a tile ahead: so the loads of keys and values wait for no
    other load, and the compiler can have several tiles of them in flight.
    """
    BLOCK_M: tl.constexpr = q.shape[0]
    HEAD_PAD: tl.constexpr = q.shape[1]
    factor = LOG2_E if SOFT_CAP else scale * LOG2_E
    acc = tl.zeros([BLOCK_M, HEAD_PAD], tl.float32)
    dims = tl.arange(0, HEAD_PAD)
    blocks = _blocks(block_table, first_tile, seq_len, PAGE_SIZE, TILE)
    for tile in range(first_tile, last_tile):
        keys = tile * TILE + tl.arange(0, TILE)
        places = _places(blocks, tile, block_stride, slot_stride, PAGE_SIZE, TILE)
        places = places[:, None] + dims[None, :]
        exists = (keys < seq_len)[:, None] & (dims < HEAD_SIZE)[None, :]
        k = tl.load(key_cache + places, mask=exists, other=0.0)
        v = tl.load(value_cache + places, mask=exists, other=0.0)
        blocks = _blocks(block_table, tile + 1, seq_len, PAGE_SIZE, TILE)
        scores = tl.dot(q, tl.trans(k.to(q.dtype)), input_precision="ieee")
        if SOFT_CAP:
            # tanh(x) = 1 - 2 / (1 + exp(2 x)), right at both infinities too.
            power = tl.exp2(scores * (2 * scale * LOG2_E / soft_cap))
            scores = soft_cap - 2 * soft_cap / (1 + power)
        if (tile < full_tile) | (tile >= full_end):
            visible = _visible(
                keys, masks, prefix, position, tree_start, seq_len, window, WINDOW
            )
            scores = tl.where(visible, scores, float("-inf"))
        row_max_before = row_max
        row_max = tl.maximum(row_max, tl.max(scores, 1) * factor)
        # A row that has seen no key: with any finite shift its weights are 0.
        shift = tl.where(row_max == float("-inf"), 0.0, row_max)
        weights = tl.exp2(scores * factor - shift[:, None])
        decay = tl.exp2(row_max_before - shift)
        row_sum = row_sum * decay + tl.sum(weights, 1)
        weights = weights.to(q.dtype)
        acc = acc * decay[:, None]
        acc = tl.dot(weights, v.to(q.dtype), acc, input_precision="ieee")
    return acc, row_max, row_sum


@triton.jit
def _tile_ranges(
    masks, position, prefix, is_row, tree_start, seq_len, window,
    WINDOW: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Tiles of this program's split: first, first without mask, behind those, last."""
    in_tree = masks != 0
    end = tl.where(in_tree, tl.minimum(tree_start + 64, seq_len), prefix)
    last = tl.cdiv(tl.max(tl.where(is_row, end, 0)), TILE)
    full_end = tl.min(tl.where(is_row, prefix, NO_LIMIT)) // TILE
    first = 0
    full = 0
    if WINDOW:
        seen_from = tl.maximum(position - window + 1, 0)
        # An ancestor's slot lies at its position or behind it.
        first = tl.min(tl.where(is_row, seen_from, NO_LIMIT)) // TILE
        full = tl.cdiv(tl.max(tl.where(is_row, seen_from, 0)), TILE)
    share = tl.cdiv(last - first, tl.num_programs(2))
    share = tl.maximum(share, MIN_TILES_PER_SPLIT)
    first += tl.program_id(2) * share
    last = tl.minimum(first + share, last)
    full = tl.minimum(tl.maximum(full, first), last)
    full_end = tl.minimum(tl.maximum(full_end, full), last)
    return first, full, full_end, last


@triton.jit
def _rows(token_stride, head_stride, BLOCK_M: tl.constexpr, GROUP: tl.constexpr):
    """Offsets of a q block's rows from its first one, int32: saves registers."""
    rows = tl.arange(0, BLOCK_M)
    return rows // GROUP * token_stride + rows % GROUP * head_stride


@triton.jit
def _store(
    acc, row_max, row_sum, token, head, num_heads, is_row,
    output, token_stride, head_stride, partials, partial_lse,
    SPLIT: tl.constexpr, GROUP: tl.constexpr, HEAD_SIZE: tl.constexpr,
):  # fmt: skip
    """Write a q block's output, or its share of it where the context is split."""
    BLOCK_M: tl.constexpr = acc.shape[0]
    dims = tl.arange(0, acc.shape[1])
    seen = row_sum > 0
    row_sum = tl.where(seen, row_sum, 1.0)
    out = acc / row_sum[:, None]
    places = is_row[:, None] & (dims < HEAD_SIZE)[None, :]
    if SPLIT:
        num_splits = tl.num_programs(2)
        share = (token * num_heads + head) * num_splits + tl.program_id(2)
        rows = _rows(num_heads * num_splits, num_splits, BLOCK_M, GROUP)
        lse = tl.where(seen, row_max + tl.log2(row_sum), float("-inf"))
        tl.store(partial_lse + share + rows, lse, mask=is_row)
        # The merge reads no output whose log-sum-exp says that it is empty.
        places &= seen[:, None]
        block = partials + share * HEAD_SIZE
        tl.store(block + (rows * HEAD_SIZE)[:, None] + dims[None, :], out, mask=places)
    else:
        block = output + token * token_stride + head * head_stride
        rows = _rows(token_stride, head_stride, BLOCK_M, GROUP)
        out = out.to(output.dtype.element_ty)
        tl.store(block + rows[:, None] + dims[None, :], out, mask=places)


# Nothing is compiled anew for what differs between a target and what drafts for it.
@triton.jit(
    do_not_specialize=["num_reqs", "window", "table_stride"],
    do_not_specialize_on_alignment=[
        "query_start_loc",
        "seq_lens",
        "block_table",
        "tree_starts",
    ],
)
def tree_attention_kernel(
    query, key_cache, value_cache, output, partials, partial_lse,
    query_start_loc, seq_lens, block_table, node_masks, tree_starts, sinks,
    key_scale, value_scale, scale, soft_cap, window, num_reqs,
    query_stride, query_head_stride, output_stride, output_head_stride,
    block_stride, slot_stride, kv_head_stride, table_stride,
    ONE_BLOCK: tl.constexpr, SPLIT: tl.constexpr, WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr, SINKS: tl.constexpr, FP8: tl.constexpr,
    GROUP: tl.constexpr, HEAD_SIZE: tl.constexpr, HEAD_PAD: tl.constexpr,
    PAGE_SIZE: tl.constexpr, BLOCK_M: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Attention of one q block over one split; grid (q blocks, kv heads, splits)."""
    BLOCK_Q: tl.constexpr = BLOCK_M // GROUP
    q_block = tl.program_id(0)
    kv_head = tl.program_id(1)
    request = q_block
    if not ONE_BLOCK:
        request = _find_request(query_start_loc, q_block, num_reqs, BLOCK_Q)
    start = tl.load(query_start_loc + request)
    query_len = tl.load(query_start_loc + request + 1) - start
    skipped = 0
    if not ONE_BLOCK:
        skipped = (q_block - (start // BLOCK_Q + request)) * BLOCK_Q
    if skipped >= query_len:
        return
    seq_len = tl.load(seq_lens + request)
    tree_start = tl.load(tree_starts + request)

    # int64, as everything that is multiplied by a stride of a whole tensor
    token = (start + skipped).to(tl.int64)
    head = kv_head * GROUP
    rows = tl.arange(0, BLOCK_M)
    dims = tl.arange(0, HEAD_PAD)
    local = rows // GROUP
    is_row = (local < query_len - skipped) & (rows < BLOCK_Q * GROUP)
    masks = tl.load(node_masks + token + local, mask=is_row, other=0)
    masks = masks.to(tl.uint64, bitcast=True)
    position = seq_len - query_len + skipped + local
    # A node lies at its position or behind it; a block's row sees bits above its own.
    depth = tl.minimum(tree_start + _bit_count(masks) - 1, position)
    position = tl.where(masks != 0, depth, position)
    prefix = tl.where(masks != 0, tree_start, position + 1)
    prefix = tl.minimum(prefix, seq_len)
    first, full, full_end, last = _tile_ranges(
        masks, position, prefix, is_row, tree_start, seq_len, window, WINDOW, TILE
    )
    block = query + token * query_stride + head * query_head_stride
    rows = _rows(query_stride, query_head_stride, BLOCK_M, GROUP)
    q = tl.load(
        block + rows[:, None] + dims[None, :],
        mask=is_row[:, None] & (dims < HEAD_SIZE)[None, :],
        other=0.0,
    )
    if FP8:
        scale *= tl.load(key_scale)
    key_cache += kv_head.to(tl.int64) * kv_head_stride
    value_cache += kv_head.to(tl.int64) * kv_head_stride
    block_table += request.to(tl.int64) * table_stride
    row_max, row_sum = _without_keys(sinks, head, BLOCK_M, GROUP, SINKS)
    acc, row_max, row_sum = _attend(
        q, row_max, row_sum, first, last, full, full_end,
        key_cache, value_cache, block_table, block_stride, slot_stride,
        masks, prefix, position, tree_start, seq_len, window, scale, soft_cap,
        WINDOW, SOFT_CAP, HEAD_SIZE, PAGE_SIZE, TILE,
    )  # fmt: skip
    if FP8:
        acc *= tl.load(value_scale)
    _store(
        acc, row_max, row_sum, token, head, tl.num_programs(1) * GROUP, is_row,
        output, output_stride, output_head_stride, partials, partial_lse,
        SPLIT, GROUP, HEAD_SIZE,
    )  # fmt: skip


@triton.jit(
    do_not_specialize=["num_reqs", "num_splits"],
    do_not_specialize_on_alignment=["query_start_loc"],
)
def merge_kernel(
    partials, partial_lse, output, query_start_loc, num_reqs, num_splits,
    output_stride, output_head_stride,
    HEAD_SIZE: tl.constexpr, HEAD_PAD: tl.constexpr,
):  # fmt: skip
    """Join the splits' outputs by their log-sum-exp; grid (tokens, heads)."""
    token = tl.program_id(0)
    head = tl.program_id(1)
    if token >= tl.load(query_start_loc + num_reqs):
        return
    share = (token.to(tl.int64) * tl.num_programs(1) + head) * num_splits
    splits = tl.arange(0, SPLITS)
    lse = tl.load(partial_lse + share + splits, splits < num_splits, float("-inf"))
    peak = tl.max(lse, 0)
    # No split saw a key: any finite number makes all weights 0.
    peak = tl.where(peak == float("-inf"), 0.0, peak)
    total = tl.sum(tl.exp2(lse - peak), 0)

    dims = tl.arange(0, HEAD_PAD)
    acc = tl.zeros([HEAD_PAD], tl.float32)
    for chunk in range(0, num_splits, MERGE_CHUNK):
        part = chunk + tl.arange(0, MERGE_CHUNK)
        part_lse = tl.load(partial_lse + share + part, part < num_splits, float("-inf"))
        weights = tl.exp2(part_lse - peak)
        values = tl.load(
            partials + (share + part)[:, None] * HEAD_SIZE + dims[None, :],
            mask=(weights > 0)[:, None] & (dims < HEAD_SIZE)[None, :],
            other=0.0,
        )
        acc += tl.sum(values * weights[:, None], 0)
    out = acc / tl.where(total > 0, total, 1.0)
    places = output + token.to(tl.int64) * output_stride + head * output_head_stride
    tl.store(places + dims, out.to(output.dtype.element_ty), mask=dims < HEAD_SIZE)
