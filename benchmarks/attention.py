"""What tree attention costs more than stock attention over as many tokens.

Times the stock CPU kernel on a chain of draft tokens and on as many tree nodes along
branches: one step of all layers, KV writes and block copies included, in turn. Prints
medians; ``python -m benchmarks.attention --help`` lists the options.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor
from vllm import _custom_ops as ops
from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

from vllm_treespec.core.tree_builders import from_parents
from vllm_treespec.core.views import PagedBatch
from vllm_treespec.layouts.base import ForkSpace
from vllm_treespec.layouts.block_copies import BlockCopier
from vllm_treespec.layouts.branch_plan import plan_branches

CHAIN = list(range(-1, 16))
TREES = {
    "chain of 17": CHAIN,
    "rsd_s 4x4": [-1, 0, 0, 0, 0, 1, 1, 2, 3, 5, 5, 6, 8, 9, 9, 11, 12],
    "rsd_c 4,3": [-1, 0, 0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3, 4, 4, 4],
    "rsd_c 16": [-1] + [0] * 16,
}


class Layer:
    """One attention layer with a paged KV cache, at the shape of SmolLM2-135M."""

    heads, kv_heads, head_size, block_size = 9, 3, 64, 32
    dtype = torch.bfloat16

    def __init__(self, context: int, num_layers: int) -> None:
        """Make caches of ``num_layers`` layers, so that none stays in the CPU cache."""
        self.context = context
        columns = context // self.block_size + 2
        self.forks = ForkSpace(columns + 1, 16, 2, self.block_size)
        blocks = columns + 1 + 32
        shape = (num_layers, blocks, self.kv_heads, self.block_size, 2 * self.head_size)
        self.caches = torch.randn(shape).to(self.dtype)
        self.copier = BlockCopier(list(self.caches))
        self.table = torch.arange(1, columns + 1, dtype=torch.int32)[None]
        self.isa = _get_attn_isa(self.dtype, self.block_size, self.head_size, "auto")

    def step(self, parents: list[int]) -> Callable[[], None]:
        """All layers' KV writes and attention for one tree of one request."""
        num_nodes = len(parents)
        slots = torch.arange(self.context, self.context + num_nodes) + self.block_size
        starts = torch.tensor([0, num_nodes])
        batch = PagedBatch(starts, torch.tensor([self.context]), self.table, slots)
        tree = from_parents([[0] * num_nodes], [parents])
        plan = plan_branches(tree, torch.tensor([0]), batch, self.forks)
        query = torch.randn(num_nodes, self.heads, self.head_size).to(self.dtype)
        key = torch.randn(num_nodes, self.kv_heads, self.head_size).to(self.dtype)
        out = torch.empty_like(query)
        chain = len(plan.seq_lens) == 1

        def run() -> None:
            self.copier.copy_apart(plan.copy_from, plan.copy_to)
            metadata = ops.cpu_attn_get_scheduler_metadata(
                num_reqs=len(plan.seq_lens),
                num_heads=self.heads,
                num_kv_heads=self.kv_heads,
                head_dim=self.head_size,
                seq_lens=plan.seq_lens,
                dtype=self.dtype,
                query_start_loc=plan.query_start_loc,
                causal=True,
                sliding_window_size=-1,
                isa=self.isa,
                enable_kv_split=True,
            )
            for cache in self.caches:
                new = key if chain else key.index_select(0, plan.write_rows)
                value = key if chain else key.index_select(0, plan.write_rows)
                where = slots if chain else plan.write_slots
                halves = self.halves(cache)
                ops.cpu_attn_reshape_and_cache(new, value, *halves, where, self.isa)
                ops.cpu_attention_with_kv_cache(
                    query=query,
                    key_cache=halves[0],
                    value_cache=halves[1],
                    output=out,
                    query_start_loc=plan.query_start_loc,
                    seq_lens=plan.seq_lens,
                    scale=self.head_size**-0.5,
                    causal=True,
                    alibi_slopes=None,
                    sliding_window=-1,
                    block_table=plan.block_table,
                    softcap=0.0,
                    scheduler_metadata=metadata,
                    s_aux=None,
                )

        return run

    def halves(self, cache: Tensor) -> tuple[Tensor, Tensor]:
        """The key and value parts of a layer's cache, as the kernel wants them."""
        shape = (cache.shape[0], self.kv_heads, 2 * self.block_size, -1)
        key_cache, value_cache = cache.view(shape).chunk(2, dim=2)
        return key_cache, value_cache


def main(
    contexts: Annotated[str, typer.Option(help="Context lengths.")] = "128,528,2064",
    layers: Annotated[int, typer.Option(help="Layers of one step.")] = 30,
    rounds: Annotated[int, typer.Option(help="Timed turns of each tree.")] = 40,
    out: Annotated[Path | None, typer.Option(help="JSON file to write.")] = None,
) -> None:
    """Time attention of one step on a chain and along branches, in turn."""
    table = Table(title=f"attention of one step, {layers} layers, ms (median)")
    for heading in ("context", *TREES):
        table.add_column(heading, justify="right")
    results = {}
    for context in map(int, contexts.split(",")):
        layer = Layer(context, layers)
        steps = {name: layer.step(parents) for name, parents in TREES.items()}
        times: dict[str, list[float]] = {name: [] for name in TREES}
        for turn in range(rounds + 3):
            for name, step in steps.items():
                start = time.perf_counter()
                step()
                if turn >= 3:
                    times[name].append(1000 * (time.perf_counter() - start))
        medians = {name: statistics.median(spent) for name, spent in times.items()}
        results[context] = medians
        table.add_row(str(context), *(f"{ms:.2f}" for ms in medians.values()))
    Console().print(table)
    if out is not None:
        out.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    typer.run(main)
