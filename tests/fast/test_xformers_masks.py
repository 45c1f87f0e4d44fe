"""Trees, masks and branches are those of xformers' tree attention, an outside oracle.

Its ``TreeAttnMetadata`` and attention biases are plain torch; its kernels, which need
a GPU, are not asked.
"""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch import Tensor

from tests.fast.random_trees import random_parents
from vllm_treespec.proposers.medusa import Medusa
from vllm_treespec.trees.builders import from_parents
from vllm_treespec.trees.tree import (
    TreeBatch,
    ancestor_bits,
    ancestor_mask,
    first_child,
)

oracle = pytest.importorskip(
    "xformers.ops.tree_attention", reason="needs xformers (make setup installs it)"
)
attn_bias = pytest.importorskip("xformers.ops.fmha.attn_bias")

from vllm_treespec.batch.views import GroupBlocks, PagedBatch  # noqa: E402
from vllm_treespec.layouts.base import ForkSpace  # noqa: E402
from vllm_treespec.layouts.branch_plan import BranchPlan, plan_branches  # noqa: E402

CPU = torch.device("cpu")
SEEDS = range(12)
SIZES = (2, 3, 7, 20, 64)


def random_batch(seed: int, sizes: tuple[int, ...] = SIZES) -> TreeBatch:
    """Random trees of the given sizes."""
    generator = torch.Generator().manual_seed(seed)
    parents = [random_parents(size, generator) for size in sizes]
    return from_parents(parents, parents)


def choices(parents: list[int]) -> list[tuple[int, ...]]:
    """Each draft node as xformers names it: by child ranks from the root down."""
    paths: list[tuple[int, ...]] = [()]
    for node, parent in enumerate(parents[1:], start=1):
        paths.append((*paths[parent], parents[:node].count(parent)))
    return paths[1:]


def metadata_of(tree: TreeBatch, req: int) -> tuple[object, Tensor]:
    """What xformers derives for a tree, and its number of each of our nodes.

    The nodes are told in reverse, so that the order is xformers' own.
    """
    parents = tree.parents[req, : int(tree.num_nodes[req])].tolist()
    paths = choices(parents)
    metadata = oracle.TreeAttnMetadata.from_tree_choices(paths[::-1])
    numbers = [0] + [metadata.tree_choices.index(path) + 1 for path in paths]
    return metadata, torch.tensor(numbers)


def tree_visible(tree: TreeBatch, req: int) -> Tensor:
    """xformers' tree mask in our node order, bool [num_nodes, num_nodes]."""
    metadata, number = metadata_of(tree, req)
    return metadata.attention_bias[number][:, number] == 0  # type: ignore[attr-defined]


def seen_bits(bits: Tensor) -> Tensor:
    """Bit masks int64 [...] as bool [..., 64]."""
    return (bits[..., None] >> torch.arange(64)) & 1 == 1


def test_trees_are_the_oracles() -> None:
    """Red when parents, depths, children, siblings, paths or masks mean another tree.

    A tree's positions are the context's length and the depths.
    """
    for seed in SEEDS:
        tree = random_batch(seed)
        mask, first = ancestor_mask(tree), first_child(tree)
        seen = seen_bits(ancestor_bits(tree, int(tree.depths.max())))
        for req, size in enumerate(tree.num_nodes.tolist()):
            found, number = metadata_of(tree, req)
            x: dict[str, Tensor] = vars(found)
            drafts = number[1:]
            assert torch.equal(
                number[tree.parents[req, 1:size]], x["parent_node_indices"][drafts - 1]
            )
            assert torch.equal(
                tree.depths[req, :size].int(), x["tree_seq_position_ids"][number]
            )
            visible = tree_visible(tree, req)
            assert torch.equal(mask[req, :size, :size], visible)
            assert torch.equal(seen[req, :size, :size], visible)
            inner = first[req, :size] >= 0
            assert torch.equal(inner, x["num_children_per_node"][number] > 0)
            assert torch.equal(
                number[first[req, :size][inner]],
                x["child_node_indices"][number[inner], 0] + 1,
            )
            # children of one node, side by side
            rank = torch.cat([torch.zeros(1).long(), x["candidate_idx"]])[number]
            same = tree.parents[req, 2:size] == tree.parents[req, 1 : size - 1]
            assert torch.equal(rank[2:][same], rank[1:-1][same] + 1)
            leaves = (~inner).nonzero()[:, 0].tolist()
            ours = {tuple(number[mask[req, i, :size]].tolist()) for i in leaves}
            paths = x["retrieval_indices"].tolist()
            assert ours == {tuple(n for n in path if n >= 0) for path in paths}


def test_static_trees_are_the_oracles() -> None:
    """Red when Medusa's static tree numbers its nodes in another order."""
    accuracies = [[0.6, 0.2, 0.1], [0.4, 0.15, 0.1], [0.3, 0.1]]
    medusa = Medusa(num_drafts=20, rank_accuracies=accuracies)
    found = oracle.TreeAttnMetadata.from_tree_choices(choices(medusa.parents.tolist()))
    assert torch.equal(medusa.parents[1:], found.parent_node_indices)
    assert torch.equal(medusa.depths.int(), found.tree_seq_position_ids)


class Batch:
    """Requests with and without trees, and where xformers says that rows may look."""

    def __init__(self, seed: int, block_size: int) -> None:
        """Make one; every request's blocks lie anywhere in the cache."""
        generator = torch.Generator().manual_seed(seed)
        self.tree = random_batch(seed, (9, 1, 20, 4))
        self.reqs = torch.tensor([0, 2, 3, 5])
        queries = torch.tensor([0, 7, 0, 0, 1, 0])
        queries[self.reqs] = self.tree.num_nodes
        contexts = torch.randint(0, 40, queries.shape, generator=generator)
        self.query_lens, self.lens = queries, contexts + queries
        self.block_size = block_size
        columns = int(self.lens.max()) // block_size + 1
        self.max_len = columns * block_size
        order = torch.randperm(len(queries) * columns, generator=generator)
        table = order.view(len(queries), -1)
        rows = torch.repeat_interleave(torch.arange(len(queries)), queries)
        starts = torch.nn.functional.pad(queries.cumsum(0), (1, 0))
        places = torch.arange(len(rows)) - starts[rows] + contexts[rows]
        slots = table[rows, places // block_size] * block_size + places % block_size
        blocks = GroupBlocks(table.int(), slots)
        self.paged = PagedBatch(starts, contexts, (blocks,))
        self.rows, self.places = rows, places
        self.forks = ForkSpace(
            first_block=table.numel(),
            forks_per_tree=20,
            blocks_per_fork=(block_size - 1 + 20) // block_size + 1,
            block_size=block_size,
        )

    def expected(self) -> Tensor:
        """Which token a row sees: bool [num_rows, num_reqs * max_len]."""
        causal = attn_bias.BlockDiagonalCausalWithOffsetPaddedKeysMask.from_seqlens(
            self.query_lens.tolist(), self.max_len, self.lens.tolist(), device=CPU
        )
        shape = (len(self.rows), len(self.lens) * self.max_len)
        visible = causal.materialize(shape) == 0
        for tree, req in enumerate(self.reqs.tolist()):
            mask = tree_visible(self.tree, tree)
            first = int(self.paged.query_start_loc[req])
            node = req * self.max_len + int(self.paged.context_lens[req])
            visible[first : first + len(mask), node : node + len(mask)] = mask
        return visible

    def along_branches(self, plan: BranchPlan) -> Tensor:
        """How often a row sees a token along the plan's causal sequences."""
        num_blocks = self.forks.block(torch.tensor(len(self.reqs)), 0, 0)
        holder = torch.full((int(num_blocks), self.block_size), -1)
        table, contexts = self.paged.groups[0].block_table, self.paged.context_lens
        for req, length in enumerate(contexts.tolist()):
            at = torch.arange(length)
            blocks = table[req, at // self.block_size].long()
            holder[blocks, at % self.block_size] = req * self.max_len + at
        holder[plan.copy_to] = holder[plan.copy_from]
        tokens = (self.rows * self.max_len + self.places)[plan.row_order]
        holder.view(-1)[plan.write_slots] = tokens[plan.write_rows]
        paged = attn_bias.PagedBlockDiagonalCausalWithOffsetPaddedKeysMask
        bias = paged.from_seqlens(
            plan.query_start_loc.diff().tolist(),
            plan.seq_lens.tolist(),
            plan.block_table,
            self.block_size,
            device=CPU,
        )
        sequence_len = plan.block_table.shape[1] * self.block_size
        shape = (len(self.rows), len(plan.seq_lens) * sequence_len)
        sees = bias.materialize(shape) == 0
        held = holder.view(-1)[: sees.shape[1]]
        assert not bool(sees[:, held < 0].any())
        counts = torch.zeros((len(self.rows), len(self.lens) * self.max_len)).long()
        counts.index_add_(1, held.clamp(min=0), sees.long())
        return torch.zeros_like(counts).index_copy_(0, plan.row_order, counts)


def test_branches_see_what_the_tree_mask_shows() -> None:
    """Red when a node sees another token along its branch than by the tree's mask.

    Tokens are counted: seeing one twice would weigh it twice.
    """
    for seed, block_size in product(SEEDS, (4, 16)):
        batch = Batch(seed, block_size)
        (plan,) = plan_branches(batch.tree, batch.reqs, batch.paged, [batch.forks])
        assert torch.equal(batch.along_branches(plan), batch.expected().long())


def test_another_tree_is_noticed() -> None:
    """Red when these tests pass whatever the tree: here one leaf hangs elsewhere."""
    batch = Batch(0, 16)
    expected = batch.expected()
    tree = batch.tree
    parents = [
        row[:n] for row, n in zip(tree.parents.tolist(), tree.num_nodes, strict=True)
    ]
    parents[3][-1] -= 1
    batch.tree = from_parents(parents, parents)
    assert not torch.equal(batch.expected(), expected)
    (plan,) = plan_branches(batch.tree, batch.reqs, batch.paged, [batch.forks])
    assert not torch.equal(batch.along_branches(plan), expected.long())
