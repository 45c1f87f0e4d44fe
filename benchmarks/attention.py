"""What tree attention costs more than stock attention over as many tokens, on a CPU.

Times the stock kernel on a chain of draft tokens and on as many tree nodes along
branches: one step of all layers, KV writes and block copies included, in turn.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import torch
import typer

from benchmarks.harness import options, plot, report
from benchmarks.harness.provenance import provenance
from vllm_treespec.batch.views import GroupBlocks, PagedBatch
from vllm_treespec.layouts.base import ForkSpace
from vllm_treespec.layouts.block_copies import BlockCopier
from vllm_treespec.layouts.branch_plan import plan_branches
from vllm_treespec.trees.builders import from_parents

WARM_UPS = 3
TREES = {
    "chain of 17": list(range(-1, 16)),
    "rsd_s 4x4": [-1, 0, 0, 0, 0, 1, 1, 2, 3, 5, 5, 6, 8, 9, 9, 11, 12],
    "rsd_c 4,3": [-1, 0, 0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3, 4, 4, 4],
    "rsd_c 16": [-1] + [0] * 16,
}
# Of SmolLM2-135M.
HEADS, KV_HEADS, HEAD_SIZE, BLOCK_SIZE = 9, 3, 64, 32
DTYPE = torch.bfloat16
Contexts = Annotated[str, typer.Option(help="Context lengths.")]
NumLayers = Annotated[int, typer.Option(min=1, help="Layers of one step.")]
Rounds = Annotated[int, typer.Option(min=1, help="Timed turns of each tree.")]


def attention(
    contexts: Contexts = "128,528,2064",
    layers: NumLayers = 30,
    rounds: Rounds = 40,
    out: Annotated[Path, typer.Option(help="For results.")] = Path("runs/attention"),
) -> None:
    """Time attention of one step on a chain and along branches, in turn."""
    with options.one_line_errors("attention"):
        lengths = options.numbers(contexts, "--contexts", int, 1)
    origin = provenance("attention", layers=layers, rounds=rounds)
    rows = [{"context": c, "ms": time_trees(c, layers, rounds)} for c in lengths]
    content = {**report.header(origin, {}, []), "rows": rows}
    report.write_json(out, content)
    render(content, out)
    options.console.print((out / "results.md").read_text(), markup=False)


def time_trees(context: int, layers: int, rounds: int) -> dict[str, float]:
    """Median milliseconds of a step, by tree."""
    columns = context // BLOCK_SIZE + 2
    # as many layers as a model has: their caches do not stay in the CPU's cache
    shape = (layers, columns + 33, KV_HEADS, BLOCK_SIZE, 2 * HEAD_SIZE)
    caches = torch.randn(shape).to(DTYPE)
    steps = {name: tree_step(tree, context, caches) for name, tree in TREES.items()}
    times: dict[str, list[float]] = {name: [] for name in TREES}
    for _ in range(WARM_UPS + rounds):
        for name, step in steps.items():
            start = time.perf_counter()
            step()
            times[name].append(1000 * (time.perf_counter() - start))
    return {name: statistics.median(ms[WARM_UPS:]) for name, ms in times.items()}


def tree_step(
    parents: list[int], context: int, caches: torch.Tensor
) -> Callable[[], None]:
    """Make a step of one tree: KV writes and attention of all layers' caches."""
    from vllm import _custom_ops as ops
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    num_nodes, columns = len(parents), context // BLOCK_SIZE + 2
    table = torch.arange(1, columns + 1, dtype=torch.int32)[None]
    slots = torch.arange(context, context + num_nodes) + BLOCK_SIZE
    starts = torch.tensor([0, num_nodes])
    blocks = GroupBlocks(table, slots)
    batch = PagedBatch(starts, torch.tensor([context]), (blocks,))
    tree = from_parents([[0] * num_nodes], [parents])
    forks = ForkSpace(columns + 1, 16, 2, BLOCK_SIZE)
    (plan,) = plan_branches(tree, torch.tensor([0]), batch, [forks])
    copier = BlockCopier(list(caches))
    query = torch.randn(num_nodes, HEADS, HEAD_SIZE).to(DTYPE)
    key = torch.randn(num_nodes, KV_HEADS, HEAD_SIZE).to(DTYPE)
    out, chain = torch.empty_like(query), len(plan.seq_lens) == 1
    isa = _get_attn_isa(DTYPE, BLOCK_SIZE, HEAD_SIZE, "auto")
    where = slots if chain else plan.write_slots
    both = {"query_start_loc": plan.query_start_loc, "seq_lens": plan.seq_lens}
    sizes = {"num_heads": HEADS, "num_kv_heads": KV_HEADS, "head_dim": HEAD_SIZE}
    no_features = {"alibi_slopes": None, "softcap": 0.0, "s_aux": None}

    def run() -> None:
        copier.copy_disjoint(plan.copy_from, plan.copy_to)
        metadata = ops.cpu_attn_get_scheduler_metadata(
            num_reqs=len(plan.seq_lens),
            dtype=DTYPE,
            causal=True,
            sliding_window_size=-1,
            isa=isa,
            enable_kv_split=True,
            **sizes,
            **both,
        )
        for cache in caches:
            new = key if chain else key.index_select(0, plan.write_rows)
            value = key if chain else key.index_select(0, plan.write_rows)
            # keys and values as the kernel wants them
            wide = cache.view(len(cache), KV_HEADS, 2 * BLOCK_SIZE, -1)
            halves = wide.chunk(2, dim=2)
            ops.cpu_attn_reshape_and_cache(new, value, *halves, where, isa)
            ops.cpu_attention_with_kv_cache(
                query,
                *halves,
                out,
                scale=HEAD_SIZE**-0.5,
                causal=True,
                sliding_window=-1,
                block_table=plan.block_table,
                scheduler_metadata=metadata,
                **no_features,
                **both,
            )

    return run


def render(content: report.Content, out: Path) -> None:
    """Write the table and the plot."""
    title = f"Attention of one step, {content['provenance']['layers']} layers"
    points = [
        {"context": row["context"], "tree": tree, "ms": ms}
        for row in content["rows"]
        for tree, ms in row["ms"].items()
    ]
    columns = {tree: f"{{ms[{tree}]:.2f}}" for tree in TREES}
    table = report.table_of(content["rows"], {"context": "{context}", **columns})
    parts = ["Medians, ms.", table]
    report.write_markdown(out, title, parts, content)
    plot.line_panels(points, out / "results.png", x="context", y="ms", hue="tree")
