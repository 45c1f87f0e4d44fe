"""The KV move in Triton's interpreter against rows gathered and put back by torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
import torch
from torch import Tensor

from tests.fast.interpreted import interpreted
from tests.fast.random_trees import random_parents
from vllm_treespec.kernels import kv_move
from vllm_treespec.kernels.kv_move import KvMover

PAGE_SIZE = 4
LAYOUTS = ["heads outside", "tokens outside"]
DTYPES = [torch.float32, torch.bfloat16, torch.uint8]


@pytest.fixture(autouse=True, scope="module")
def in_interpreter() -> Iterator[None]:
    """Run the kernel without a card."""
    with interpreted(kv_move):
        yield


def caches(
    layout: str,
    dtype: torch.dtype,
    num_layers: int = 3,
    num_heads: int = 2,
    head_size: int = 8,
    num_blocks: int = 40,
) -> list[Tensor]:
    """Caches of random bits, logically [num_blocks, num_heads, page, 2 * head_size]."""
    generator = torch.Generator().manual_seed(0)
    shape = [num_blocks, num_heads, PAGE_SIZE, 2 * head_size]
    if layout == "tokens outside":
        shape[1], shape[2] = shape[2], shape[1]
    made = []
    for _ in range(num_layers):
        size = torch.Size([*shape[:3], shape[3] * dtype.itemsize])
        bits = torch.randint(256, size, generator=generator, dtype=torch.uint8)
        cache = bits.view(dtype)
        made.append(cache.transpose(1, 2) if layout == "tokens outside" else cache)
    return made


def random_paths(
    sizes: Sequence[int], max_depth: int, seed: int
) -> tuple[Tensor, Tensor]:
    """Paths from the root of random trees to one of their nodes, and their lengths."""
    generator = torch.Generator().manual_seed(seed)
    path = torch.full((len(sizes), max_depth), -1)
    for row, size in enumerate(sizes):
        parents = random_parents(size, generator)
        node = int(torch.randint(size, (1,), generator=generator))
        nodes: list[int] = []
        while node > 0:
            nodes.insert(0, node)
            node = parents[node]
        nodes = nodes[:max_depth]
        path[row, : len(nodes)] = torch.tensor(nodes, dtype=torch.int64)
    return path, (path >= 0).sum(1)


def random_blocks(num_trees: int, max_blocks: int, num_blocks: int) -> Tensor:
    """Block tables of different blocks, int32 [num_trees, max_blocks]."""
    generator = torch.Generator().manual_seed(1)
    order = torch.randperm(num_blocks, generator=generator)
    return order[: num_trees * max_blocks].view(num_trees, max_blocks).int()


def moved(
    kv_caches: list[Tensor],
    path: Tensor,
    num_accepted: Tensor,
    tree_starts: Tensor,
    block_table: Tensor,
) -> list[Tensor]:
    """What the caches should be: all rows of a tree are read before one is written."""
    expected = []
    for cache in kv_caches:
        after = cache.clone()
        for tree, count in enumerate(num_accepted.tolist()):
            for d in range(count):
                source = int(tree_starts[tree] + path[tree, d])
                goal = int(tree_starts[tree]) + d + 1
                source_block = block_table[tree, source // PAGE_SIZE]
                goal_block = block_table[tree, goal // PAGE_SIZE]
                after[goal_block, :, goal % PAGE_SIZE] = cache[
                    source_block, :, source % PAGE_SIZE
                ]
        expected.append(after)
    return expected


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether tensors are equal, NaNs of random bits included."""
    pair = (value.contiguous().view(torch.uint8) for value in (one, other))
    return torch.equal(*pair)


def check(
    kv_caches: list[Tensor], path: Tensor, num_accepted: Tensor, tree_starts: Tensor
) -> None:
    """Move and compare every byte of every cache."""
    last = int(tree_starts.max()) + 64
    blocks = random_blocks(len(path), last // PAGE_SIZE + 1, len(kv_caches[0]))
    arguments = (path, num_accepted, tree_starts, blocks)
    expected = moved(kv_caches, *arguments)
    KvMover(kv_caches, PAGE_SIZE).move(*arguments)
    for found, wanted in zip(kv_caches, expected, strict=True):
        assert same_bits(found, wanted)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_random_trees(layout: str, dtype: torch.dtype) -> None:
    """Red when a stride, a word size or a block boundary is taken wrongly."""
    sizes = [1, 12, 24, 7, 18]
    path, num_accepted = random_paths(sizes, 6, seed=0)
    assert int(num_accepted.max()) > 2
    tree_starts = torch.tensor([0, 3, 17, 9, 6])
    check(caches(layout, dtype, num_blocks=120), path, num_accepted, tree_starts)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_goals_that_are_other_nodes_sources(layout: str) -> None:
    """Red when a row is overwritten before its own move."""
    steps = [2, 3, 4, 5, 6, 7, 8, 9]
    path = torch.tensor([steps, [1, 2, 4, 5, 7, 8, 9, 11], [9, *steps[1:]]])
    num_accepted = torch.tensor([8, 8, 1])
    tree_starts = torch.tensor([2, 5, 0])
    check(caches(layout, torch.float32, num_blocks=80), path, num_accepted, tree_starts)


def test_nothing_accepted() -> None:
    """Red when a tree without accepted nodes, or no tree at all, moves a row."""
    path = torch.full((2, 3), -1)
    zeros = torch.zeros(2, dtype=torch.int64)
    check(caches(LAYOUTS[0], torch.float32), path, zeros, zeros)
    cache = caches(LAYOUTS[0], torch.float32)
    before = [part.clone() for part in cache]
    blocks = torch.zeros((0, 4), dtype=torch.int32)
    KvMover(cache, PAGE_SIZE).move(path[:0], zeros[:0], zeros[:0], blocks)
    assert all(map(same_bits, cache, before))


@pytest.mark.parametrize("tree_starts", [[60, 1021], [1, 3000]])
def test_far_positions(tree_starts: list[int]) -> None:
    """Red when a tree that crosses blocks late in a long context is misplaced."""
    path, num_accepted = random_paths([40, 30], 8, seed=3)
    starts = torch.tensor(tree_starts)
    check(
        caches(LAYOUTS[1], torch.bfloat16, num_blocks=1600), path, num_accepted, starts
    )


@pytest.mark.parametrize(
    ("num_heads", "head_size", "dtype", "word_bytes"),
    [
        (1, 128, torch.bfloat16, 8),
        (12, 64, torch.float32, 8),
        (5, 6, torch.bfloat16, 8),
        (5, 5, torch.bfloat16, 4),
        (3, 5, torch.uint8, 2),
        (32, 96, torch.uint8, 8),
    ],
)
def test_sizes_of_rows(
    num_heads: int, head_size: int, dtype: torch.dtype, word_bytes: int
) -> None:
    """Red when rows of several programs, or of odd sizes, lose words."""
    for layout in LAYOUTS:
        cache = caches(layout, dtype, 1, num_heads, head_size, num_blocks=80)
        assert KvMover(cache, PAGE_SIZE).word_bytes == word_bytes
        path, num_accepted = random_paths([20, 20, 20], 5, seed=2)
        check(cache, path, num_accepted, torch.tensor([0, 11, 6]))


def test_caches_inside_one_allocation() -> None:
    """Red when only caches that begin an allocation, or fill it, are found."""
    whole = torch.stack(caches(LAYOUTS[0], torch.float32, num_blocks=80), dim=1)
    views = list(whole[:, :, 1:].unbind(1))
    assert not views[0].is_contiguous()
    path, num_accepted = random_paths([20, 20, 20], 5, seed=2)
    before = whole.clone()
    check(views, path, num_accepted, torch.tensor([0, 11, 6]))
    assert same_bits(whole[:, :, 0], before[:, :, 0])
    assert not same_bits(whole, before)


def test_layers_that_share_a_cache() -> None:
    """Red when a shared cache's rows are moved twice."""
    cache = caches(LAYOUTS[0], torch.float32, num_layers=1)[0]
    path, blocks = torch.tensor([[2, 3]]), random_blocks(1, 4, 40)
    arguments = (path, torch.tensor([2]), torch.tensor([1]), blocks)
    (expected,) = moved([cache], *arguments)
    KvMover([cache, cache], PAGE_SIZE).move(*arguments)
    assert same_bits(cache, expected)


def test_wrong_order_is_noticed() -> None:
    """Red when the comparison could no longer see rows overwritten too early."""
    cache = caches(LAYOUTS[0], torch.float32, num_layers=1)[0]
    path, blocks = torch.tensor([[2, 3, 4]]), random_blocks(1, 4, 40)
    start = torch.tensor([1])
    (expected,) = moved([cache], path, torch.tensor([3]), start, blocks)
    mover = KvMover([cache], PAGE_SIZE)
    for d in (2, 1, 0):  # the last node first
        alone = torch.tensor([[path[0, d] - d]])
        mover.move(alone, torch.tensor([1]), start + d, blocks)
    assert not same_bits(cache, expected)


def test_refused_caches() -> None:
    """Red when caches that one launch cannot move are moved somehow."""
    cache = caches(LAYOUTS[0], torch.float32, num_layers=1)[0]
    other = caches(LAYOUTS[1], torch.float32, num_layers=1)[0]
    with pytest.raises(ValueError, match="no KV cache to move"):
        KvMover([], PAGE_SIZE)
    with pytest.raises(ValueError, match="of 2 layouts; use one KvMover for each"):
        KvMover([cache, other], PAGE_SIZE)
    for wrong in (cache[0], cache.mT, cache[..., ::2]):
        with pytest.raises(ValueError, match="expected \\[num_blocks, num_kv_heads, 4"):
            KvMover([wrong], PAGE_SIZE)
    with pytest.raises(ValueError, match="expected"):
        KvMover([cache], 2 * PAGE_SIZE)
