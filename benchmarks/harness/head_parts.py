"""What engine processes do to time the parts of a head."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING, Any

from vllm_treespec.batch.stats import StepStats
from vllm_treespec.tools.sides import Cell, CellResult

if TYPE_CHECKING:
    from vllm_treespec.tools.side_engine import SideEngine

# Measures a cell, and what the head does in the stage "draft".
PROFILED = "benchmarks.harness.head_parts:profiled"
# Parts of the stage "draft", by the method of the head that does them. A head of chains
# runs all levels when it begins.
PARTS = {
    "read": "pairs",
    "begin": "levels",
    "root_logits": "levels",
    "extend": "levels",
}


def profiled(engine: SideEngine, cell: Cell) -> CellResult:
    """Time the answers, and what the head does in the stage "draft"."""
    engine.llm.collective_rpc(time_parts)
    return engine.time_answers(cell)


def time_parts(worker: Any) -> None:
    """Let a worker add the times of PARTS to its stages, from now on."""
    for head in worker.model_runner.drafter.paged:
        for method, stage in PARTS.items():
            # What is timed already is an attribute of the head, not of its class.
            if method not in vars(head):
                timed_method = timed(getattr(head, method), stage, head.stats)
                setattr(head, method, timed_method)


def timed(call: Callable[..., Any], stage: str, stats: StepStats) -> Callable[..., Any]:
    """Add the time of each call to a stage."""

    @wraps(call)
    def run(*args: Any) -> Any:
        with stats.stage(stage):
            return call(*args)

    return run
