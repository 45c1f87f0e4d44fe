"""The process in which one engine of random weights runs: reads a task on stdin."""

from __future__ import annotations

import os
import random
import sys
import time
from typing import Any

from vllm import LLM, SamplingParams
from vllm.inputs import TokensInput, tokens_input
from vllm.outputs import RequestOutput
from vllm.sampling_params import RequestOutputKind

from benchmarks.gpu.cells import CellFolder
from benchmarks.gpu.engines import EngineCell, Task, Work
from benchmarks.gpu.oracle import default_depth
from benchmarks.gpu.oracle_drafter import oracle_arguments, use_acceptance
from benchmarks.gpu.shapes import SHAPES
from benchmarks.gpu.timers import start_timers, take_times
from vllm_treespec.core.tree import MAX_NODES
from vllm_treespec.tools.sides import Acceptance

WARM_UP_STEPS = 20
WARM_UP_TOKENS = 24
FIRST_TOKEN = 3


class RandomEngine:
    """An engine whose model has random weights."""

    def __init__(self, task: Task) -> None:
        """Start the engine of the task."""
        self.task = task
        batch = max(work.batch for work in task.work)
        arguments: dict[str, Any] = {
            "model": task.model,
            "dtype": task.dtype,
            "load_format": "dummy",
            "skip_tokenizer_init": True,
            "enable_prefix_caching": False,
            "max_model_len": max(map(self.longest, task.work)),
            "max_num_seqs": batch,
            "max_num_batched_tokens": 8192,
            "seed": 0,
        }
        if task.side.nodes:
            arguments |= oracle_arguments(task.side.nodes, 0.0, batch, task.device)
        self.llm = LLM(**{**arguments, **task.side.engine})
        self.engine = self.llm.llm_engine
        self.timed = task.side.one_process
        if self.timed:
            self.llm.collective_rpc(start_timers)
        self.num_requests = 0

    def longest(self, work: Work) -> int:
        """Most tokens that a request of this work can have."""
        # the scheduler lets no tree reach beyond max_model_len
        room = work.context + 2 * MAX_NODES
        if work.kind == "answers":
            return room + work.count
        # steps while prompts are still read, then all others
        steps = work.batch + WARM_UP_STEPS + work.count
        return room + steps * (1 + default_depth(max(self.task.side.nodes, 1)))

    def prompt(self, num_tokens: int) -> TokensInput:
        """Random tokens, others for every request."""
        rng = random.Random(self.num_requests)
        vocab_size = SHAPES[self.task.shape].vocab_size
        return tokens_input(
            [rng.randrange(FIRST_TOKEN, vocab_size) for _ in range(num_tokens)]
        )

    def add(self, work: Work, max_tokens: int) -> list[str]:
        """Add the requests of a batch; returns their names."""
        params = SamplingParams(
            temperature=work.temperature,
            max_tokens=max_tokens,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        names = []
        for _ in range(work.batch):
            names.append(str(self.num_requests))
            self.engine.add_request(names[-1], self.prompt(work.context), params)
            self.num_requests += 1
        return names

    def step(self) -> list[RequestOutput]:
        """One step of the engine: the new tokens of each request."""
        outputs = self.engine.step()
        assert all(isinstance(output, RequestOutput) for output in outputs)
        return outputs

    def emitted(self) -> int:
        """Tokens that one step emits."""
        return sum(len(output.outputs[0].token_ids) for output in self.step())

    def measure(self, work: Work) -> EngineCell:
        """Measure one cell."""
        if work.acceptance is not None and self.task.side.nodes:
            self.llm.collective_rpc(use_acceptance, args=(work.acceptance,))
        found = self.answers(work) if work.kind == "answers" else self.steps(work)
        seconds, steps, num_tokens = found
        cell = EngineCell(
            name=work.name,
            settings=self.task.settings,
            commit=self.task.commit,
            shape=self.task.shape,
            side=self.task.side.name,
            nodes=self.task.side.nodes,
            work=work,
            seconds=seconds,
            steps=steps,
            num_tokens=num_tokens,
            chosen=self.chosen(),
        )
        self.add_parts(cell)
        return cell

    def steps(self, work: Work) -> tuple[float, int, int]:
        """Time steps in which every request decodes: seconds, steps, tokens."""
        names = self.add(work, self.longest(work) - work.context - MAX_NODES)
        started: set[str] = set()
        while len(started) < work.batch:
            started.update(output.request_id for output in self.step())
        for _ in range(WARM_UP_STEPS):
            self.step()
        self.reset()
        start = time.perf_counter()
        num_tokens = sum(self.emitted() for _ in range(work.count))
        seconds = time.perf_counter() - start
        self.parts = self.read_parts()
        self.engine.abort_request(names)
        while self.engine.has_unfinished_requests():
            self.step()
        return seconds, work.count, num_tokens

    def answers(self, work: Work) -> tuple[float, int | None, int]:
        """Time whole answers, prompts included, after a short warm-up."""
        self.add(work, WARM_UP_TOKENS)
        while self.engine.has_unfinished_requests():
            self.step()
        self.reset()
        start = time.perf_counter()
        self.add(work, work.count)
        num_tokens = 0
        while self.engine.has_unfinished_requests():
            num_tokens += self.emitted()
        seconds = time.perf_counter() - start
        self.parts = self.read_parts()
        return seconds, None, num_tokens

    def reset(self) -> None:
        """Start all timers and counters anew."""
        if self.timed:
            self.llm.collective_rpc(take_times)
        if self.task.side.nodes:
            self.llm.collective_rpc("treespec_stats", kwargs={"reset": True})

    def read_parts(self) -> tuple[dict[str, float], dict[str, Any]]:
        """Milliseconds of the forwards, and the worker's totals, since the reset."""
        forwards: dict[str, float] = {}
        totals: dict[str, Any] = {}
        if self.timed:
            [forwards] = self.llm.collective_rpc(take_times)
        if self.task.side.nodes:
            [totals] = self.llm.collective_rpc("treespec_stats")
        return forwards, totals

    def add_parts(self, cell: EngineCell) -> None:
        """Add what the timers and counters say, per step."""
        forwards, totals = self.parts
        steps = cell.steps or totals.get("steps")
        if steps:
            cell.forward_ms = {part: ms / steps for part, ms in forwards.items()}
        if totals and steps:
            cell.stage_ms = {
                stage: 1000 * seconds / steps
                for stage, seconds in totals["seconds"].items()
            }
        if totals.get("trees"):
            accepted = {int(d): count for d, count in totals["accepted"].items()}
            found = Acceptance.from_histogram(
                totals["trees"], totals["nodes"], accepted
            )
            cell.acceptance_length = found.length

    def chosen(self) -> dict[str, str]:
        """What vLLM made of the arguments."""
        config = self.engine.vllm_config
        return {
            "runner": "V2" if config.use_v2_model_runner else "V1",
            "async": str(bool(config.scheduler_config.async_scheduling)),
            "graphs": str(config.compilation_config.cudagraph_mode.name),
            "attention": str(config.attention_config.backend),
        }


def main() -> None:
    """Run the task on stdin; what vLLM prints goes to stderr, finished cells to
    stdout."""
    task = Task.model_validate_json(sys.stdin.read())
    folder = CellFolder(task.out, EngineCell, task.settings)
    with os.fdopen(os.dup(1), "w") as finished:
        os.dup2(2, 1)
        engine = RandomEngine(task)
        for work in task.work:
            folder.add(engine.measure(work))
            print(work.name, file=finished, flush=True)


if __name__ == "__main__":
    main()
