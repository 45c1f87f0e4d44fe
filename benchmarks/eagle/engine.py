"""What engine processes do: take turns with plain vLLM."""

from __future__ import annotations

from typing import Any

from benchmarks.harness.head_parts import time_parts
from vllm_treespec.schedule.listed import ListedSchedule
from vllm_treespec.tools.side_engine import SideEngine, tpot_ms
from vllm_treespec.tools.sides import PLAIN, Cell, CellResult, plain_side


def in_turn(engine: SideEngine, cell: Cell) -> CellResult:
    """Answer prompts without trees, each also by plain vLLM, in this one process.

    ``details`` get ``ours_ms`` and ``plain_ms``: for each answer the mean time of a
    step, prompt reading left out. The first of the two changes with every prompt.
    """
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
