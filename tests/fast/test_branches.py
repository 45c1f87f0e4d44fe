"""Tree attention along branches, on the stock CPU kernels and real paged KV."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch
from torch import Tensor

from tests.fast.random_trees import random_parents
from vllm_treespec.trees.builders import from_parents
from vllm_treespec.trees.tree import TreeBatch, ancestor_mask

ops = pytest.importorskip("vllm._custom_ops", reason="needs vLLM's CPU kernels")
cpu_attn = pytest.importorskip("vllm.v1.attention.backends.cpu_attn")

from vllm_treespec.batch.views import GroupBlocks, PagedBatch  # noqa: E402
from vllm_treespec.layouts.base import ForkSpace  # noqa: E402
from vllm_treespec.layouts.block_copies import BlockCopier  # noqa: E402
from vllm_treespec.layouts.branch_plan import (  # noqa: E402
    BranchPlan,
    commit_copies,
    plan_branches,
)

# (context length, query length, tree parents or None)
MIXED_BATCH = [
    (70, 6, [-1, 0, 0, 1, 1, 2]),
    (0, 40, None),
    (64, 1, None),
    (30, 8, [-1, 0, 0, 0, 1, 1, 3, 5]),
    (127, 4, [-1, 0, 1, 2]),
    (33, 5, None),
    (96, 7, [-1, 0, 0, 0, 0, 0, 0]),
]


class Paged:
    """A paged KV cache with a random block table, and a dense copy to compare to."""

    def __init__(self, batch: list, head_size: int, kv_heads: int, block_size: int):
        self.batch, self.block_size = batch, block_size
        self.kv_heads, self.group = kv_heads, 3
        widest = max(c + q for c, q, _ in batch)
        columns = widest // block_size + 2
        self.num_blocks = 1 + len(batch) * columns
        order = torch.randperm(self.num_blocks - 1)[: len(batch) * columns] + 1
        self.block_table = order.view(len(batch), columns).int()
        self.trees = [(r, p) for r, (_, _, p) in enumerate(batch) if p]
        depth = 8
        self.forks = ForkSpace(
            first_block=self.num_blocks,
            forks_per_tree=12,
            blocks_per_fork=(block_size - 1 + depth) // block_size + 1,
            block_size=block_size,
        )
        fork_blocks = len(self.trees) * 12 * self.forks.blocks_per_fork
        self.cache = torch.randn(
            self.num_blocks + fork_blocks, kv_heads, block_size, 2 * head_size
        )
        self.head_size = head_size
        self.isa = cpu_attn._get_attn_isa(torch.float32, block_size, head_size, "auto")
        lens = torch.tensor([q for _, q, _ in batch])
        starts = torch.nn.functional.pad(lens.cumsum(0), (1, 0))
        contexts = torch.tensor([c for c, _, _ in batch])
        self.slots = torch.cat(
            [self.slot(r, torch.arange(c, c + q)) for r, (c, q, _) in enumerate(batch)]
        )
        blocks = GroupBlocks(self.block_table, self.slots)
        self.paged = PagedBatch(starts, contexts, (blocks,))
        self.keys = [torch.randn(c + q, kv_heads, head_size) for c, q, _ in batch]
        self.values = [torch.randn_like(k) for k in self.keys]
        self.queries = torch.randn(int(lens.sum()), kv_heads * self.group, head_size)
        for r, (c, _, _) in enumerate(batch):
            self.write(self.keys[r][:c], self.values[r][:c], self.slot(r, range(c)))

    def slot(self, req: int, positions: Iterable[int] | Tensor) -> Tensor:
        positions = torch.as_tensor(list(positions), dtype=torch.int64)
        block = self.block_table[req][positions // self.block_size].long()
        return block * self.block_size + positions % self.block_size

    def halves(self) -> tuple[Tensor, Tensor]:
        shape = (self.cache.shape[0], self.kv_heads, 2 * self.block_size, -1)
        key_cache, value_cache = self.cache.view(shape).chunk(2, dim=2)
        return key_cache, value_cache

    def write(self, keys: Tensor, values: Tensor, slots: Tensor) -> None:
        ops.cpu_attn_reshape_and_cache(keys, values, *self.halves(), slots, self.isa)

    def attend(
        self, queries: Tensor, starts: Tensor, lens: Tensor, table: Tensor
    ) -> Tensor:
        out = torch.empty_like(queries)
        metadata = ops.cpu_attn_get_scheduler_metadata(
            num_reqs=len(lens),
            num_heads=self.kv_heads * self.group,
            num_kv_heads=self.kv_heads,
            head_dim=self.head_size,
            seq_lens=lens,
            dtype=torch.float32,
            query_start_loc=starts,
            causal=True,
            sliding_window_size=-1,
            isa=self.isa,
            enable_kv_split=True,
        )
        key_cache, value_cache = self.halves()
        ops.cpu_attention_with_kv_cache(
            query=queries,
            key_cache=key_cache,
            value_cache=value_cache,
            output=out,
            query_start_loc=starts,
            seq_lens=lens,
            scale=self.head_size**-0.5,
            causal=True,
            alibi_slopes=None,
            sliding_window=-1,
            block_table=table,
            softcap=0.0,
            scheduler_metadata=metadata,
            s_aux=None,
        )
        return out

    def tree_batch(self) -> tuple[TreeBatch, Tensor]:
        tokens = [[0] * len(p) for _, p in self.trees]
        tree = from_parents(tokens, [p for _, p in self.trees])
        return tree, torch.tensor([r for r, _ in self.trees])

    def run(self) -> tuple[BranchPlan, TreeBatch, Tensor, Tensor]:
        """Write and attend along branches; outputs are in the plan's row order."""
        tree, reqs = self.tree_batch()
        (plan,) = plan_branches(tree, reqs, self.paged, [self.forks])
        BlockCopier([self.cache]).copy(plan.copy_from, plan.copy_to)
        new_keys = torch.cat(
            [k[c:] for k, (c, _, _) in zip(self.keys, self.batch, strict=True)]
        )
        new_values = torch.cat(
            [v[c:] for v, (c, _, _) in zip(self.values, self.batch, strict=True)]
        )
        order = plan.row_order
        self.write(
            new_keys[order][plan.write_rows],
            new_values[order][plan.write_rows],
            plan.write_slots,
        )
        out = self.attend(
            self.queries[order], plan.query_start_loc, plan.seq_lens, plan.block_table
        )
        return plan, tree, reqs, out

    def expected(self, req: int, row: int, seen: Tensor) -> Tensor:
        """Plain attention of one query over the positions it may see."""
        query = self.queries[row].view(self.kv_heads, self.group, -1)
        keys, values = self.keys[req][seen], self.values[req][seen]
        scores = torch.einsum("hgd,shd->hgs", query, keys) * self.head_size**-0.5
        out = torch.einsum("hgs,shd->hgd", scores.softmax(-1), values)
        return out.flatten(0, 1)


def check(paged: Paged) -> None:
    plan, tree, _, out = paged.run()
    by_old_row = torch.empty_like(out)
    by_old_row[plan.row_order] = out
    mask = ancestor_mask(tree)
    tree_of = {r: t for t, (r, _) in enumerate(paged.trees)}
    for r, (context, length, _) in enumerate(paged.batch):
        start = int(paged.paged.query_start_loc[r])
        for i in range(length):
            seen = torch.zeros(context + length, dtype=torch.bool)
            seen[:context] = True
            if r in tree_of:
                seen[context:] = mask[tree_of[r], i, :length]
            else:
                seen[context : context + i + 1] = True
            torch.testing.assert_close(
                by_old_row[start + i],
                paged.expected(r, start + i, seen),
                atol=2e-5,
                rtol=1e-4,
            )


@pytest.mark.parametrize(
    ("head_size", "kv_heads", "block_size"),
    [(64, 3, 32), (64, 1, 128), (128, 2, 64), (80, 2, 32), (64, 2, 16)],
)
def test_mixed_batch_equals_causal_attention(head_size, kv_heads, block_size):
    """Turns red when a branch misses its context's tail block or a node's KV."""
    torch.manual_seed(head_size + block_size)
    check(Paged(MIXED_BATCH, head_size, kv_heads, block_size))


def test_random_trees_equal_causal_attention():
    """Turns red when the order of nodes, forks or sequences drifts apart."""
    for seed in range(12):
        generator = torch.Generator().manual_seed(seed)
        torch.manual_seed(seed)
        batch: list[tuple[int, int, list[int] | None]] = []
        for _ in range(4):
            context = int(torch.randint(0, 100, (1,), generator=generator))
            nodes = int(torch.randint(1, 14, (1,), generator=generator))
            parents = random_parents(nodes, generator)
            batch.append((context, nodes, parents))
        batch.insert(1, (5, 9, None))
        check(Paged(batch, 64, 3, 32))


def test_committed_kv_is_what_plain_decoding_writes():
    """Turns red when commit copies the wrong fork, or not all blocks of a path."""
    for seed in range(6):
        torch.manual_seed(seed)
        paged = Paged(MIXED_BATCH, 64, 3, 32)
        plan, tree, reqs, _ = paged.run()
        mask = ancestor_mask(tree)
        last = torch.tensor(
            [int(torch.randint(0, len(p), (1,))) for _, p in paged.trees]
        )
        depth = tree.depths[torch.arange(len(last)), last]
        (copies,) = commit_copies(plan, last, depth, reqs, paged.paged, [paged.forks])
        BlockCopier([paged.cache]).copy(*copies)
        for t, (r, parents) in enumerate(paged.trees):
            context = paged.batch[r][0]
            path = mask[t, last[t]].nonzero()[:, 0] + context
            seen = torch.cat([torch.arange(context), path])
            assert len(parents) >= len(path)
            query = paged.queries[:1]
            out = paged.attend(
                query,
                torch.tensor([0, 1], dtype=torch.int32),
                torch.tensor([len(seen)], dtype=torch.int32),
                paged.block_table[r : r + 1],
            )
            torch.testing.assert_close(
                out[0], paged.expected(r, 0, seen), atol=2e-5, rtol=1e-4
            )


def test_forgotten_tail_block_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: without the copied tail block the check must fail."""
    torch.manual_seed(0)
    paged = Paged(MIXED_BATCH, 64, 3, 32)
    monkeypatch.setattr(BlockCopier, "copy", lambda *_: None)
    with pytest.raises(AssertionError):
        check(paged)
