"""Answers while the batch stays full, as in a server where requests wait."""

from __future__ import annotations

import itertools
import time

from vllm.outputs import RequestOutput
from vllm.sampling_params import RequestOutputKind

from vllm_treespec.tools.side_engine import SideEngine, tpot_ms
from vllm_treespec.tools.sides import Cell, CellResult


def measure(engine: SideEngine, cell: Cell) -> CellResult:
    """Time until ``num_prompts`` answers have ended; a free place is taken at once.

    Without this, few long answers decide at the end of a batch, and sides whose answers
    end at different times have smaller batches. The first answers are shortened, each
    less than the one before: where all end together, as plain decoding's would, the
    next prompts are read in one step, which no server can count on.

    The result's ``unfinished_tokens`` are those of the requests that run when the last
    answer ends. They are then aborted.
    """
    engine.warm_up(cell)
    prompts = itertools.cycle(engine.prompts_of(cell))
    max_tokens = cell.max_tokens or engine.job.max_tokens
    first_lengths = [
        max(1, max_tokens * place // cell.batch_size)
        for place in range(1, cell.batch_size + 1)
    ]
    lengths = itertools.chain(first_lengths, itertools.repeat(max_tokens))
    core = engine.llm.llm_engine
    running: dict[str, list[int]] = {}
    ended: list[tuple[RequestOutput, list[int]]] = []
    before = engine.read_counters()
    start = time.perf_counter()
    while len(ended) < (cell.num_prompts or len(engine.prompts)):
        while len(running) < cell.batch_size:
            name = engine.new_id()
            params = engine.params(cell.temperature, next(lengths))
            params.output_kind = RequestOutputKind.DELTA
            core.add_request(name, next(prompts), params)
            running[name] = []
        for output in core.step():
            assert isinstance(output, RequestOutput)
            running[output.request_id] += output.outputs[0].token_ids
            if output.finished:
                ended.append((output, running.pop(output.request_id)))
    seconds = time.perf_counter() - start
    result = CellResult(
        cell=cell,
        seconds=seconds,
        num_tokens=[len(tokens) for _, tokens in ended],
        tpot_ms=[tpot_ms(output, len(tokens)) for output, tokens in ended],
        token_ids=[tokens for _, tokens in ended],
        unfinished_tokens=sum(map(len, running.values())),
    )
    engine.add_acceptance(result, before)
    core.abort_request([*running])
    while core.has_unfinished_requests():
        core.step()
    return result
