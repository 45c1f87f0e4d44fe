"""What a step without trees costs in an engine with a head, beside plain vLLM."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from benchmarks.harness.head_parts import time_parts
from benchmarks.harness.plan import StoredCell
from benchmarks.harness.report import Columns
from vllm_treespec.batch.stats import KEEP_FEATURES
from vllm_treespec.schedule.listed import ListedSchedule
from vllm_treespec.tools.sides import PLAIN, Cell, CellResult, plain_side

if TYPE_CHECKING:
    from vllm_treespec.tools.side_engine import SideEngine

PLAIN_STEP = "plain-step"
IN_TURN = "benchmarks.eagle.plain_step:in_turn"
COLUMNS: Columns = {
    "answers": "{answers}",
    "without trees, ms": "{ours_ms:.3f}",
    "plain vLLM, ms": "{plain_ms:.3f}",
    "ratio": "{ratio:.4f}",
    "our stages, ms": "{own_ms:.3f}",
    "of it keeping features": "{features_ms:.3f}",
}


def in_turn(engine: SideEngine, cell: Cell) -> CellResult:
    """Answer prompts without trees, each also by plain vLLM, in this one process.

    ``details`` get ``ours_ms`` and ``plain_ms``: for each answer the mean time of a
    step, prompt reading left out. The first of the two changes with every prompt.
    """
    from vllm_treespec.tools.side_engine import SideEngine, tpot_ms

    eager = engine.job.side.engine["enforce_eager"]
    side = plain_side(PLAIN, eager)
    plain = SideEngine(engine.job.model_copy(update={"side": side}))
    engine.llm.collective_rpc(draw_no_trees)
    engine.llm.collective_rpc(time_parts)
    both = {"ours_ms": engine, "plain_ms": plain}
    prompts = engine.prompts_of(cell)
    params = engine.params(cell.temperature, cell.max_tokens or engine.job.max_tokens)
    for one in both.values():
        one.generate(prompts[:1], params, batch_size=1)
    before = engine.read_counters()
    times: dict[str, list[float | None]] = {name: [] for name in both}
    num_tokens = []
    for prompt in prompts:
        for name, one in both.items():
            [output] = one.generate([prompt], params, batch_size=1)
            times[name].append(tpot_ms(output))
        num_tokens.append(len(output.outputs[0].token_ids))
        both = dict(reversed(both.items()))
    result = CellResult(
        cell=cell,
        seconds=0.0,
        num_tokens=num_tokens,
        tpot_ms=times["ours_ms"],
        token_ids=[],
        details=times,
    )
    engine.add_acceptance(result, before)
    return result


def draw_no_trees(worker: Any) -> None:
    """Empty a worker's schedule: all its steps are plain from now on."""
    schedule = worker.model_runner.decoder.method.schedule
    assert isinstance(schedule, ListedSchedule)
    schedule.trees = ()


def plain_steps_of(finished: Sequence[StoredCell]) -> list[dict[str, Any]]:
    """Times of a step without trees beside plain vLLM's: a row for each round.

    Times are in milliseconds, medians over the answers; ``ratio`` is the median of
    their ratios, ``own_ms`` what our stages count, ``features_ms`` a part of it.
    """
    rows = []
    for result in [s.result for s in finished if s.side.name == PLAIN_STEP]:
        both = result.details["ours_ms"], result.details["plain_ms"]
        pairs = [(a, b) for a, b in zip(*both, strict=True) if a and b]
        stages, steps = result.stage_seconds, result.steps or 1
        row = {
            "answers": len(pairs),
            "ours_ms": statistics.median(ours for ours, _ in pairs),
            "plain_ms": statistics.median(plain for _, plain in pairs),
            "ratio": statistics.median(ours / plain for ours, plain in pairs),
            "own_ms": 1000 * (stages["draft"] + stages["tree_build"]) / steps,
            "features_ms": 1000 * stages[KEEP_FEATURES] / steps,
        }
        rows.append(row)
    return rows
