"""How cells with random weights are measured, in the engine's process."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from vllm import SamplingParams
from vllm.inputs import TokensInput, tokens_input
from vllm.sampling_params import RequestOutputKind

from benchmarks.gpu.oracle import use_acceptance
from benchmarks.gpu.step import FAMILY, WARM_UP_STEPS
from benchmarks.gpu.timeline import TRACES, read_timeline
from vllm_treespec.tools.side_engine import SideEngine
from vllm_treespec.tools.sides import Cell, CellResult
from vllm_treespec.trees.tree import MAX_NODES

WARM_UP_TOKENS = 24
FIRST_TOKEN = 3


class ForwardTimers:
    """Times the target's layers and its output layer in every step of a worker.

    On a GPU by CUDA events on the stream: what the device did between the first and
    the last kernel of a forward, whenever the host enqueued them.
    """

    def __init__(self, worker: Any) -> None:
        """Put timers around the runner's forward and the model's logits."""
        runner = worker.model_runner
        self.cuda = runner.device.type == "cuda"
        self.marks: dict[str, list[tuple[Any, Any]]] = {"layers": [], "logits": []}
        runner._model_forward = self.timed("layers", runner._model_forward)
        runner.model.compute_logits = self.timed("logits", runner.model.compute_logits)

    def timed(self, part: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a call so that its start and end are marked."""

        def run(*args: Any, **options: Any) -> Any:
            start = self.mark()
            result = call(*args, **options)
            self.marks[part].append((start, self.mark()))
            return result

        return run

    def mark(self) -> Any:
        """A point in time: an event on the current stream, seconds on a CPU."""
        if not self.cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def take(self) -> dict[str, float]:
        """Milliseconds of each part since the last call."""
        if self.cuda:
            torch.cuda.synchronize()
        times = dict.fromkeys(self.marks, 0.0)
        for part, pairs in self.marks.items():
            for start, end in pairs:
                ms = start.elapsed_time(end) if self.cuda else 1000 * (end - start)
                times[part] += ms
            pairs.clear()
        return times


@cache
def timers_of(engine: SideEngine) -> ForwardTimers | None:
    """Start an engine's timers; None where its worker is in another process."""
    if not engine.job.side.one_process:
        return None
    [worker] = engine.llm.collective_rpc(lambda worker: worker)
    return ForwardTimers(worker)


def steps(engine: SideEngine, cell: Cell) -> CellResult:
    """Time a window of steps in which every request decodes."""
    core = engine.llm.llm_engine
    longest = core.vllm_config.model_config.max_model_len
    room = longest - cell.options["context"] - MAX_NODES
    params = sampling(cell, room, RequestOutputKind.DELTA)
    names = [f"{cell.name}-{number}" for number in range(cell.batch_size)]
    for name, prompt in zip(names, prepare(engine, cell), strict=True):
        core.add_request(name, prompt, params)

    def step() -> Counter[str]:
        return Counter({o.request_id: len(o.outputs[0].token_ids) for o in core.step()})

    started: Counter[str] = Counter()
    while len(started) < cell.batch_size:
        started += step()
    for _ in range(WARM_UP_STEPS):
        step()
    emitted: Counter[str] = Counter()
    reset(engine)
    start = time.perf_counter()
    for _ in range(cell.options["count"]):
        emitted += step()
    seconds = time.perf_counter() - start
    result = describe(engine, cell, seconds, [emitted[name] for name in names])
    result.steps = cell.options["count"]
    if traced := cell.options.get("traced"):
        folder = Path(core.vllm_config.profiler_config.torch_profiler_dir)
        before = set(folder.glob(TRACES))
        engine.llm.start_profile()
        for _ in range(traced):
            step()
        engine.llm.stop_profile()
        written = set(folder.glob(TRACES)) - before
        result.details["timeline"] = read_timeline(written)
    core.abort_request(names)
    while core.has_unfinished_requests():
        core.step()
    return result


def answers(engine: SideEngine, cell: Cell) -> CellResult:
    """Time whole answers, prompts included, after a short warm-up."""
    prompts, whole = prepare(engine, cell), RequestOutputKind.FINAL_ONLY
    warm_up = sampling(cell, WARM_UP_TOKENS, whole)
    engine.generate(prompts, warm_up, cell.batch_size)
    params = sampling(cell, cell.options["count"], whole)
    reset(engine)
    start = time.perf_counter()
    outputs = engine.generate(prompts, params, cell.batch_size)
    seconds = time.perf_counter() - start
    emitted = [len(output.outputs[0].token_ids) for output in outputs]
    return describe(engine, cell, seconds, emitted)


def prepare(engine: SideEngine, cell: Cell) -> list[TokensInput]:
    """Set the cell's acceptance; returns random prompts, others for every request."""
    side = engine.job.side
    if side.family == FAMILY:
        # a worker in another process is told by name
        call = use_acceptance if side.one_process else use_acceptance.__name__
        engine.llm.collective_rpc(call, args=(cell.options["acceptance"],))
    config = engine.llm.llm_engine.vllm_config.model_config
    tokens = range(FIRST_TOKEN, config.get_vocab_size())
    rng = random.Random(cell.name)
    return [
        tokens_input(rng.choices(tokens, k=cell.options["context"]))
        for _ in range(cell.batch_size)
    ]


def sampling(cell: Cell, max_tokens: int, kind: RequestOutputKind) -> SamplingParams:
    """Sample so many tokens, whatever they are."""
    return SamplingParams(
        temperature=cell.temperature,
        max_tokens=max_tokens,
        ignore_eos=True,
        detokenize=False,
        output_kind=kind,
    )


def reset(engine: SideEngine) -> None:
    """Start all timers and counters anew."""
    engine.read_counters()
    if timers := timers_of(engine):
        timers.take()


def describe(
    engine: SideEngine, cell: Cell, seconds: float, num_tokens: list[int]
) -> CellResult:
    """Make the result: with the forwards' times, and what vLLM chose."""
    timers = timers_of(engine)
    config = engine.llm.llm_engine.vllm_config
    chosen = {
        "runner": "V2" if config.use_v2_model_runner else "V1",
        "async": str(bool(config.scheduler_config.async_scheduling)),
        "graphs": str(config.compilation_config.cudagraph_mode.name),
        "attention": str(config.attention_config.backend),
    }
    result = CellResult(
        cell=cell,
        seconds=seconds,
        num_tokens=num_tokens,
        tpot_ms=[],
        token_ids=[],
        details={"forward_ms": timers.take() if timers else {}, "chosen": chosen},
    )
    engine.add_acceptance(result, [])
    return result
