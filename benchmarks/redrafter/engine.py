"""What engine processes do besides timing answers: see the steps, verify chains."""

from __future__ import annotations

import itertools
import time

from vllm.inputs import TokensInput
from vllm.outputs import RequestOutput
from vllm.sampling_params import RequestOutputKind

from benchmarks.redrafter.chains import use_chains
from vllm_treespec.tools.side_engine import SideEngine
from vllm_treespec.tools.sides import Cell, CellResult


def chains(engine: SideEngine, cell: Cell) -> CellResult:
    """Time the answers while every beam is verified as a chain of its own."""
    engine.llm.collective_rpc(use_chains, args=(True,))
    result = engine.time_answers(cell)
    engine.llm.collective_rpc(use_chains, args=(False,))
    return result


def traced(engine: SideEngine, cell: Cell) -> CellResult:
    """Answer one prompt after the other and note the tokens of every step.

    ``details`` get ``step_tokens``, per answer how many tokens each step emitted, the
    prompt's first, and ``node_counts``, how many trees had so many nodes, with roots.
    """
    before = engine.read_counters()
    start = time.perf_counter()
    answers = [steps_of(engine, prompt, cell) for prompt in engine.prompts_of(cell)]
    seconds = time.perf_counter() - start
    [totals] = engine.llm.collective_rpc("treespec_stats")
    result = CellResult(
        cell=cell,
        seconds=seconds,
        num_tokens=[sum(map(len, steps)) for steps in answers],
        tpot_ms=[None] * len(answers),
        token_ids=[list(itertools.chain(*steps)) for steps in answers],
        details={
            "step_tokens": [list(map(len, steps)) for steps in answers],
            "node_counts": totals["node_counts"],
        },
    )
    engine.add_acceptance(result, before)
    return result


def steps_of(engine: SideEngine, prompt: TokensInput, cell: Cell) -> list[list[int]]:
    """Token ids of every step of an answer."""
    params = engine.params(cell.temperature, cell.max_tokens or engine.job.max_tokens)
    params.output_kind = RequestOutputKind.DELTA
    core = engine.llm.llm_engine
    core.add_request(f"traced-{engine.num_requests}", prompt, params)
    engine.num_requests += 1
    steps = []
    while core.has_unfinished_requests():
        for output in core.step():
            assert isinstance(output, RequestOutput)
            steps.append(list(output.outputs[0].token_ids))
    return steps
