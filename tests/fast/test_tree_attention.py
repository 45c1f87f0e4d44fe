"""The tree attention kernel in Triton's interpreter, against float64."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.fast.interpreted import interpreted
from tests.fast.random_trees import random_parents
from tests.reference.attention import Batch, Layout, Request, make_batch, reference
from tests.tiers import cases, grid
from vllm_treespec.kernels import tree_attention as kernel
from vllm_treespec.kernels import tree_attention_device
from vllm_treespec.kernels.tree_attention import Workspace, tree_attention
from vllm_treespec.kernels.workspace import fewest_good_splits

UNTOUCHED = 7.0
SMALL_TREE = (-1, 0, 0, 1, 1, 2, 3, 3)
CHAIN_OF_64 = (-1, *range(63))
# Node 63's mask is a negative number.
BUSHY_64 = (-1, *(i // 3 for i in range(63)))
MIXED = (
    Request(37, 1),
    Request(70, parents=SMALL_TREE),
    Request(0),
    Request(0, 40),
    Request(100, parents=SMALL_TREE, nodes=(3, 4, 5)),
    Request(130, 5),
    Request(16, parents=BUSHY_64),
)
TOLERANCE = {torch.float32: 5e-6, torch.float16: 2e-3}


@pytest.fixture(autouse=True, scope="module")
def interpreter() -> Iterator[None]:
    """Run the kernels in Triton's interpreter."""
    with interpreted(kernel, tree_attention_device):
        yield


def run(
    batch: Batch,
    num_splits: int = 1,
    window: int = 0,
    soft_cap: float = 0.0,
    sinks: Tensor | None = None,
) -> Tensor:
    """The kernel's output for a batch."""
    output = torch.full_like(batch.query, UNTOUCHED)
    num_tokens, num_heads, head_size = batch.query.shape
    tree_attention(
        batch.query,
        batch.key_cache,
        batch.value_cache,
        output,
        **batch.metadata,
        max_query_len=max(len(request.rows) for request in batch.requests),
        scale=head_size**-0.5,
        sliding_window=window,
        soft_cap=soft_cap,
        key_scale=batch.key_scale,
        value_scale=batch.value_scale,
        sinks=sinks,
        workspace=Workspace(num_tokens, num_heads, head_size, "cpu", num_splits),
    )
    return output


def error(batch: Batch, num_splits: int = 1, **options: Any) -> float:
    """Largest difference from the reference, with the options of ``run``."""
    wanted = reference(batch, batch.query.shape[2] ** -0.5, **options)
    found = run(batch, num_splits, **options)[: wanted.shape[0]]
    return float((found.double() - wanted).abs().max())


@pytest.mark.thorough
@pytest.mark.parametrize("num_splits", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_mixed_batch(dtype: torch.dtype, num_splits: int) -> None:
    """Red when a kind of request beside others gets another's keys, rows or mask."""
    batch = make_batch(MIXED, Layout(dtype=dtype, padding=3))
    assert error(batch, num_splits) < TOLERANCE[dtype]


@pytest.mark.parametrize(
    ("head_size", "dtype"),
    grid(
        [64, 80, 96, 128, 256],
        [torch.float32, torch.float16],
        quick=lambda size, dtype: size in ((64, 80) if dtype.itemsize == 2 else (128,)),
    ),
)
def test_head_sizes(head_size: int, dtype: torch.dtype) -> None:
    """Red when a head's padding takes part, or a block shape loses rows or keys."""
    requests = (Request(90, parents=SMALL_TREE), Request(3, 2))
    batch = make_batch(requests, Layout(head_size=head_size, dtype=dtype))
    assert error(batch, num_splits=2) < TOLERANCE[dtype]


@pytest.mark.parametrize(
    ("group", "heads_first"),
    grid(
        [1, 3, 4, 7, 8],
        [True, False],
        quick=lambda *case: case in ((1, True), (3, False), (8, True)),
    ),
)
def test_groups_and_physical_orders(group: int, heads_first: bool) -> None:
    """Red when query heads meet another kv head, or strides are taken for sizes."""
    layout = Layout(2, group, dtype=torch.float16, heads_first=heads_first)
    requests = (Request(20, parents=SMALL_TREE), Request(0, 19), Request(33, 1))
    assert error(make_batch(requests, layout)) < TOLERANCE[torch.float16]


@pytest.mark.parametrize("page_size", cases([16, 32, 48, 64, 128], quick=[48]))
def test_page_sizes(page_size: int) -> None:
    """Red when a tile that spans pages, or a page that spans tiles, is read wrongly."""
    requests = (Request(200, parents=SMALL_TREE), Request(47, 2), Request(48, 1))
    for dtype, bound in TOLERANCE.items():
        batch = make_batch(requests, Layout(page_size=page_size, dtype=dtype))
        assert error(batch, num_splits=2) < bound


@pytest.mark.parametrize("seed", cases(range(4), quick=[1]))
def test_random_trees(seed: int) -> None:
    """Red when the mask of some shape of tree, context or split is read wrongly."""
    generator = torch.Generator().manual_seed(seed)
    requests = []
    for _ in range(4):
        size, context = torch.randint(1, 65, (2,), generator=generator).tolist()
        parents = tuple(random_parents(size, generator))
        requests.append(Request(context * (seed + 1), parents=parents))
    batch = make_batch(requests, Layout(dtype=torch.float16), seed)
    assert error(batch, num_splits=seed + 1) < TOLERANCE[torch.float16]


@pytest.mark.parametrize("window", [0, 9])
def test_full_masks(window: int) -> None:
    """Red when bit 63, the sign, is shifted or counted as a sign."""
    batch = make_batch((Request(5, parents=BUSHY_64),), Layout(group=1))
    assert error(batch, window=window) < TOLERANCE[torch.float32]


def test_chain_under_masks_is_causal() -> None:
    """Red when a tree without branches is another thing than a chain."""
    tree = make_batch((Request(50, parents=CHAIN_OF_64),), Layout())
    chain = make_batch((Request(50, 64),), Layout())
    assert torch.equal(run(tree, window=20), run(chain, window=20))


@pytest.mark.thorough
@pytest.mark.parametrize("num_splits", [1, 40])
def test_long_context(num_splits: int) -> None:
    """Red when a part of a long context is left out or counted twice."""
    requests = (Request(4096, parents=SMALL_TREE), Request(1000, 1), Request(8, 1))
    layout = Layout(group=1, dtype=torch.float16)
    assert error(make_batch(requests, layout), num_splits) < 1e-3


@pytest.mark.parametrize(
    ("window", "num_splits"),
    cases([(1, 1), (3, 3), (64, 1), (90, 3)], quick=[(3, 3)]),
)
def test_sliding_window(window: int, num_splits: int) -> None:
    """Red when a window goes by slots, or is off by one, or a split misses its edge."""
    batch = make_batch(MIXED, Layout(dtype=torch.float16))
    assert error(batch, num_splits, window=window) < TOLERANCE[torch.float16]


@pytest.mark.parametrize(
    ("window", "num_splits"),
    grid([0, 7, 40], [1, 3], quick=lambda *case: case in ((0, 1), (7, 3), (40, 3))),
)
def test_blocks(window: int, num_splits: int) -> None:
    """Red when a block's row has its last row's window, or is off by one."""
    requests = (Request(70, 6, is_block=True), Request(1, 6, is_block=True), MIXED[1])
    batch = make_batch(requests, Layout())
    found = error(batch, num_splits, window=window)
    assert found < TOLERANCE[torch.float32]


@pytest.mark.parametrize("parents", [None, SMALL_TREE])
def test_keys_before_the_window_are_not_read(parents: tuple[int, ...] | None) -> None:
    """Red when a window costs as much as the whole context."""
    batch = make_batch((Request(320, 8, parents),), Layout(dtype=torch.float16))
    old = batch.metadata["block_table"][0, :12].long()
    batch.value_cache[old] = torch.nan
    assert bool(run(batch, window=64).isfinite().all())
    assert not bool(run(batch, window=200).isfinite().any())


def test_prompt_rows_read_no_later_keys() -> None:
    """Red when the early rows of a prompt walk over all its keys."""
    batch = make_batch((Request(0, 300),), Layout(dtype=torch.float16))
    last = batch.metadata["block_table"][0, 16].long()
    batch.value_cache[last] = torch.nan
    finite = run(batch).isfinite().all(-1).all(-1)
    assert bool(finite[:192].all())
    assert not bool(finite[272:].any())


def test_tree_deeper_than_window() -> None:
    """Red when ancestors beyond the window are seen, or those within are not."""
    requests = (
        Request(40, parents=CHAIN_OF_64),
        Request(0, parents=tuple(random_parents(64, torch.Generator()))),
    )
    batch = make_batch(requests, Layout(group=1))
    assert error(batch, window=5) < TOLERANCE[torch.float32]


def test_soft_cap() -> None:
    """Red when the cap is applied in another order than to scaled scores."""
    requests = (Request(70, parents=SMALL_TREE), Request(0, 9))
    batch = make_batch(requests, Layout())
    batch = replace(batch, query=batch.query * 20)
    assert error(batch, 2, soft_cap=2.0) < TOLERANCE[torch.float32]
    assert error(batch, 2, window=12, soft_cap=30.0) < 2e-5


# Of six heads: far below, among and far above the scores.
SINKS = torch.tensor([-30.0, 0.0, 1.0, 2.0, 4.0, 60.0])
WITH_SINKS = (Request(37, 1), Request(70, parents=SMALL_TREE), Request(0, 9))


@pytest.mark.parametrize(
    ("window", "num_splits"), cases([(0, 1), (9, 3)], quick=[(9, 3)])
)
def test_sinks(window: int, num_splits: int) -> None:
    """Red when a sink is another head's, or counts in several splits or in none."""
    batch = make_batch(WITH_SINKS, Layout(2, 3, dtype=torch.float16))
    found = error(batch, num_splits, window=window, sinks=SINKS)
    assert found < TOLERANCE[torch.float16]


def test_sinks_matter() -> None:
    """Red when scale or cap apply to a sink, or the comparison would not see one."""
    requests = (Request(20, parents=SMALL_TREE), Request(0, 3))
    batch = make_batch(requests, Layout(2, 3))
    assert error(batch, 2, soft_cap=2.0, sinks=SINKS) < TOLERANCE[torch.float32]
    plain, under = run(batch), run(batch, sinks=SINKS.bfloat16())
    torch.testing.assert_close(under[:, 0], plain[:, 0])
    assert float((under[:, 1:] - plain[:, 1:]).abs().amax((0, 2)).min()) > 1e-2


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("num_splits", cases([1, 2], quick=[1]))
def test_fp8(dtype: torch.dtype, num_splits: int) -> None:
    """Red when a scale of an fp8 cache is forgotten or applied to another tensor."""
    requests = (Request(130, parents=SMALL_TREE), Request(0, 9))
    batch = make_batch(requests, Layout(cache_dtype=dtype))
    assert error(batch, num_splits) < TOLERANCE[torch.float32]
    if dtype == torch.float8_e4m3fn:
        bits = [c.view(torch.uint8) for c in (batch.key_cache, batch.value_cache)]
        same = replace(batch, key_cache=bits[0], value_cache=bits[1])
        assert torch.equal(run(same, num_splits), run(batch, num_splits))


@pytest.mark.parametrize("num_splits", [1, 2])
def test_padding_is_left_alone(num_splits: int) -> None:
    """Red when rows of no request, or requests without rows, do something."""
    requests = (Request(70, 1), Request(30, parents=SMALL_TREE), Request(0), Request(5))
    batch = make_batch(requests, Layout(dtype=torch.float16, padding=5))
    output = run(batch, num_splits)
    assert bool((output[-5:] == UNTOUCHED).all())
    assert error(batch, num_splits) < TOLERANCE[torch.float16]


@pytest.mark.parametrize("num_splits", [1, 2])
def test_rows_without_keys_are_zero(num_splits: int) -> None:
    """Red when the capture of a graph, with fewer keys than rows, makes NaN."""
    batch = make_batch((Request(0, 4),), Layout())
    batch.metadata["seq_lens"].fill_(1)
    output = run(batch, num_splits)
    assert bool((output[:3] == 0).all())
    assert bool((run(batch, num_splits, sinks=torch.ones(2))[:3] == 0).all())
    value = batch.value_cache[batch.metadata["block_table"][0, 0], 0]
    torch.testing.assert_close(output[3:], value.expand(1, 2, -1))


def test_offsets_beyond_int32() -> None:
    """Red when addresses of a large KV cache are computed in 32 bits."""
    fp8 = torch.float8_e4m3fn
    small = make_batch(
        (Request(40, parents=SMALL_TREE),), Layout(group=1, cache_dtype=fp8)
    )
    wanted = run(small)
    # Reserved only: nothing of it is touched but three blocks.
    block_stride = 1 << 28
    memory = torch.empty(9 * block_stride + 16 * 128, dtype=fp8)
    pages = memory.as_strided((10, 16, 1, 128), (block_stride, 128, 128, 1))
    keys, values = pages.split(64, -1)
    table = small.metadata["block_table"]
    places = torch.tensor([8, 2, 9], dtype=torch.int32)
    for place, block in zip(places, table[0, :3].clone(), strict=True):
        keys[place] = small.key_cache[block]
        values[place] = small.value_cache[block]
    table[0, :3] = places
    assert torch.equal(run(replace(small, key_cache=keys, value_cache=values)), wanted)


def test_wrong_mask_is_noticed() -> None:
    """Red when the comparison above could not tell one mask from another."""
    batch = make_batch((Request(300, parents=SMALL_TREE),), Layout())
    assert error(batch) < TOLERANCE[torch.float32]
    batch.metadata["node_masks"][6] ^= 1 << 2
    assert error(batch) > 1e-3
    batch.metadata["node_masks"][6] ^= 1 << 2
    batch.metadata["tree_starts"] -= 1
    assert error(batch) > 1e-3


def test_grid_ignores_values() -> None:
    """Red when what is launched depends on tensors' values: graphs would break."""
    grids = set()
    for context in (1, 100):
        batch = make_batch((Request(context, 1), Request(context, 3)), Layout())
        batch.metadata["block_table"] = torch.zeros(2, 64, dtype=torch.int32)
        grids.add(tuple(launch.grid for launch in _inputs(batch).launches()))
    assert len(grids) == 1


def _inputs(batch: Batch, **changes: object) -> kernel.Inputs:
    """The kernel's inputs for a batch."""
    fields: dict = {
        "query": batch.query,
        "key_cache": batch.key_cache,
        "value_cache": batch.value_cache,
        "output": torch.empty_like(batch.query),
        **batch.metadata,
        "max_query_len": 3,
        "scale": 1.0,
        "sliding_window": 0,
        "soft_cap": 0.0,
        "key_scale": None,
        "value_scale": None,
        "sinks": None,
        "workspace": Workspace(16, 2, 64, "cpu"),
    }
    return kernel.Inputs(**(fields | changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scale": 0.0}, "scale 0.0; give a positive"),
        ({"node_masks": torch.zeros(4, dtype=torch.int32)}, "give int64"),
        ({"query": torch.zeros(4, 3, 64)}, "3 query heads for 2 kv heads"),
        ({"query": torch.zeros(4, 2, 64).double()}, "queries of torch.float64"),
        ({"query": torch.zeros(4, 2, 64).half()}, "keys of torch.float32"),
        ({"query": torch.zeros(4, 2, 512)}, "head size 512"),
        ({"output": torch.zeros(4, 2, 128)[..., ::2]}, "heads with gaps"),
        ({"value_cache": torch.zeros(4, 16, 2, 64)}, "differ in dtype or strides"),
        ({"key_cache": torch.zeros(4, 16, 2, 64).char().byte()}, "without key_scale"),
        ({"sinks": torch.zeros(4)}, "for 2 query heads; give one number a head"),
    ],
)
def test_refusals(changes: dict[str, Tensor], message: str) -> None:
    """Red when inputs that the kernel would misread are taken."""
    batch = make_batch((Request(9, 1), Request(9, 3)), Layout(2, 1))
    if "key_cache" in changes:
        changes = changes | {"value_cache": changes["key_cache"]}
    with pytest.raises(ValueError, match=message):
        _inputs(batch, **changes).check()


def test_splits_fill_the_card() -> None:
    """Red when a small batch leaves most of a card idle, or a full one is split."""
    assert fewest_good_splits(8, 132, 64) in (15, 16)
    assert fewest_good_splits(132, 132, 64) == 1
    assert fewest_good_splits(1000, 132, 64) == 1
    assert fewest_good_splits(1, 132, 4) == 4
    workspace = Workspace(8192, 64, 128, "meta")
    assert workspace.partials.numel() * 4 < 20e6
    assert workspace.splits(8, 32 * 32, 128, 1, 64) in (15, 16)
    assert workspace.splits(8, 8192 * 64, 128, 1, 64) == 1
    with pytest.raises(ValueError, match="num_splits is 0"):
        Workspace(1, 1, 64, "meta", num_splits=0)
