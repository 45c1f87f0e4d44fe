"""What engine processes do: time the head's parts, and take turns with plain vLLM."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from vllm_treespec.core.stats import StepStats
from vllm_treespec.tools.side_engine import SideEngine, tpot_ms
from vllm_treespec.tools.sides import PLAIN, Cell, CellResult, plain_side

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
    worker.model_runner.decoder.method.schedule.trees = ()
