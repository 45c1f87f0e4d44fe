"""What engine processes do: count leftovers, and time the output layer."""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch

from vllm_treespec.tools.side_engine import SideEngine
from vllm_treespec.tools.sides import Cell, CellResult

# Levels of a chain, as in the paper's figure 13.
ROWS = 5
REPEATS = 200


def with_leftovers(engine: SideEngine, cell: Cell) -> CellResult:
    """Time the answers, and note the draft nodes that came from leftovers.

    ``details`` get ``leftover_nodes``, which the target scored, and
    ``leftover_accepted``, both a tree.
    """
    result = engine.time_answers(cell)
    [totals] = engine.llm.collective_rpc("treespec_stats")
    names = ("leftover_nodes", "leftover_accepted")
    result.details = {name: totals[name] / max(totals["trees"], 1) for name in names}
    return result


def output_layer(engine: SideEngine, cell: Cell) -> CellResult:
    """Time the head's output layer; ``details`` are those of ``time_output``."""
    [details] = engine.llm.collective_rpc(time_output)
    unused: dict[str, Any] = {"num_tokens": [], "tpot_ms": [], "token_ids": []}
    return CellResult(cell=cell, seconds=0.0, details=details, **unused)


@torch.inference_mode()
def time_output(worker: Any) -> dict[str, float]:
    """Time output layer and softmax of a worker's head, all rows at once or one by one.

    Returns:
        Medians in milliseconds over repeats in turn: ``once_ms``, ``rows_ms``, and of
        softmax alone ``softmax_once_ms``, ``softmax_rows_ms``.

    """
    [source] = worker.model_runner.drafter.paged
    head, size = source.head, source.config.hidden_size
    states = torch.randn((ROWS, size), dtype=source.dtype, device=source.device)
    logits = head.logits(states).float()
    calls = {
        "once_ms": lambda: head.logits(states),
        "rows_ms": lambda: [head.logits(row) for row in states.split(1)],
        "softmax_once_ms": lambda: logits.softmax(-1),
        "softmax_rows_ms": lambda: [row.softmax(-1) for row in logits.split(1)],
    }
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(REPEATS):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            times[name].append(1000 * (time.perf_counter() - start))
    return {name: statistics.median(values) for name, values in times.items()}
