"""The process of one engine: reads a job on stdin, reports JSON lines."""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Collection
from pathlib import Path
from typing import Any

from vllm import LLM, SamplingParams
from vllm.inputs import tokens_input
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams
from vllm.v1.metrics.reader import Counter

from vllm_treespec.sources.suffix_index import SuffixIndex
from vllm_treespec.tools.launch import Send, reporting
from vllm_treespec.tools.sides import Acceptance
from vllm_treespec.tools.soak.records import Answer, Completion, End, SoakJob
from vllm_treespec.tools.soak.requests import SoakRequest

PREEMPTIONS = "vllm:num_preemptions"
PREFIX_QUERIES = "vllm:prefix_cache_queries"
PREFIX_HITS = "vllm:prefix_cache_hits"
REPORT_STEPS = 5


class SoakEngine:
    """One engine and the requests in it."""

    def __init__(self, job: SoakJob, send: Send) -> None:
        """Start the engine; ``send`` takes an event's name and content."""
        self.job = job
        self.send = send
        self.llm = LLM(**job.engine, disable_log_stats=False)
        self.engine = self.llm.llm_engine
        self.core = self.engine.engine_core.engine_core
        self.requests = {request.id: request for request in job.requests}
        self.open: dict[str, Answer] = {}
        # vLLM's own ids of the open requests
        self.engine_ids: dict[str, str] = {}
        self.num_finished = 0
        self.steps = 0
        self.memory: list[float] = []

    def run(self) -> End:
        """Send the requests at their steps until the last is answered."""
        start = time.perf_counter()
        waiting = list(reversed(self.job.requests))
        pause = 0
        while waiting or self.open:
            while waiting and not pause and len(self.open) < self.job.max_in_flight:
                self.add(waiting.pop())
                pause = waiting[-1].wait_steps if waiting else 0
            pause = max(0, pause - 1)
            self.step()
            for answer in list(self.open.values()):
                self.abort_if_due(answer)
        seconds = time.perf_counter() - start
        # The workers hear of the last finished requests in one more, empty step.
        while self.core.scheduler.has_requests():
            self.step()
        self.report()
        return self.end(seconds)

    def add(self, request: SoakRequest) -> None:
        """Send one request."""
        self.open[request.id] = Answer(
            id=request.id,
            completions=[Completion() for _ in range(request.params.get("n", 1))],
        )
        prompt = tokens_input(request.prompt)
        self.engine_ids[request.id] = self.engine.add_request(
            request.id, prompt, sampling_params(request)
        )

    def step(self) -> None:
        """Run the engine once and take what it hands out."""
        outputs = self.engine.step()
        self.steps += 1
        if self.steps % REPORT_STEPS == 0:
            self.memory.append(resident_mib())
            self.report()
        for output in outputs:
            assert isinstance(output, RequestOutput)
            self.take(output)

    def take(self, output: RequestOutput) -> None:
        """Add an output to its answer; send the answer when it is whole."""
        answer = self.open.get(output.request_id)
        if answer is None:
            late = [to_completion(part) for part in output.outputs]
            self.close(Answer(id=output.request_id, completions=late))
            return
        if output.prompt_logprobs:
            answer.prompt_logprobs = to_floats(output.prompt_logprobs[1:])
        delta = self.requests[answer.id].output == "delta"
        for part in output.outputs:
            new = to_completion(part)
            if delta:
                new = joined(answer.completions[part.index], new)
            answer.completions[part.index] = new
        if output.finished:
            self.close(self.open.pop(output.request_id))

    def close(self, answer: Answer) -> None:
        """Send an answer."""
        self.num_finished += 1
        self.send("answer", answer=answer.model_dump(mode="json"))

    def abort_if_due(self, answer: Answer) -> None:
        """Abort a request that has emitted as many tokens as it was to."""
        after = self.requests[answer.id].abort_after
        emitted = sum(len(part.token_ids) for part in answer.completions)
        if after is not None and emitted >= after:
            # as vLLM's server does it; by our id, a request with n > 1 leaves a trace
            self.engine.abort_request([self.engine_ids[answer.id]], internal=True)
            answer.aborted = True
            self.close(self.open.pop(answer.id))

    def report(self) -> None:
        """Send how far we are and which requests are in flight."""
        self.send(
            "progress",
            finished=self.num_finished,
            steps=self.steps,
            in_flight=list(self.open),
        )

    def end(self, seconds: float) -> End:
        """Read what the engine counted and what it still holds."""
        counts = {
            metric.name: metric.value
            for metric in self.llm.get_metrics()
            if isinstance(metric, Counter)
        }
        found = self.acceptance()
        pool = self.core.scheduler.kv_cache_manager.block_pool
        return End(
            seconds=seconds,
            steps=self.steps,
            preemptions=counts[PREEMPTIONS],
            prefix_queries=counts[PREFIX_QUERIES],
            prefix_hits=counts[PREFIX_HITS],
            trees=found.trees if found else None,
            acceptance_length=found.length if found and found.trees else None,
            num_blocks=pool.num_gpu_blocks - 1,
            free_blocks=pool.get_num_free_blocks(),
            leftovers=self.leftovers(),
            memory=self.memory,
        )

    def acceptance(self) -> Acceptance | None:
        """What the target accepted, None for a plain engine."""
        if not self.job.has_trees:
            return None
        totals = self.llm.collective_rpc("treespec_stats")[0]
        accepted = {int(d): count for d, count in totals["accepted"].items()}
        return Acceptance.from_histogram(totals["trees"], totals["nodes"], accepted)

    def leftovers(self) -> dict[str, list[str]]:
        """Where a request is still held after all have gone."""
        scheduler = self.core.scheduler
        runner = self.core.model_executor.driver_worker.worker.model_runner
        managers = scheduler.kv_cache_manager.coordinator.single_type_managers
        processor = self.engine.output_processor
        places: dict[str, Collection[str]] = {
            "scheduler": scheduler.requests,
            "scheduler's running list": [r.request_id for r in scheduler.running],
            "KV cache manager": [r for m in managers for r in m.req_to_blocks],
            "runner": runner.requests,
            "input batch": runner.input_batch.req_id_to_index,
            "output processor": [*processor.request_states, *processor.parent_requests],
        }
        if self.job.has_trees:
            decoder = runner.decoder
            places["decoder"] = decoder.slots.names()
            index = decoder.sources.text
            if isinstance(index, SuffixIndex):
                running = index.cache.running
                places["suffix index"] = [decoder.slots.name(slot) for slot in running]
        return {place: list(ids) for place, ids in places.items() if ids}


def resident_mib() -> float:
    """Memory of this process, MiB; the worker runs in it too."""
    pages = Path("/proc/self/statm").read_text().split()[1]
    return int(pages) * resource.getpagesize() / 2**20


def sampling_params(request: SoakRequest) -> SamplingParams:
    """Make vLLM's parameters of a request."""
    params = dict(request.params)
    if "structured_outputs" in params:
        grammar = params["structured_outputs"]
        params["structured_outputs"] = StructuredOutputsParams(**grammar)
    kind = RequestOutputKind[request.output.upper()]
    return SamplingParams(**params, output_kind=kind)


def to_completion(part: CompletionOutput) -> Completion:
    """Keep of an output what is compared."""
    return Completion(
        token_ids=list(part.token_ids),
        text=part.text,
        finish_reason=part.finish_reason,
        logprobs=None if part.logprobs is None else to_floats(part.logprobs),
    )


def to_floats(logprobs: Any) -> list[dict[int, float]]:
    """Log probabilities by token id, position by position."""
    return [
        {token: round(entry.logprob, 5) for token, entry in position.items()}
        for position in logprobs
    ]


def joined(old: Completion, new: Completion) -> Completion:
    """What came before and the piece that came now."""
    return Completion(
        token_ids=old.token_ids + new.token_ids,
        text=old.text + new.text,
        finish_reason=new.finish_reason,
        logprobs=None if new.logprobs is None else (old.logprobs or []) + new.logprobs,
    )


def main() -> None:
    """Run the job on stdin and report what happens."""
    job = SoakJob.model_validate_json(sys.stdin.readline())
    start = time.perf_counter()
    with reporting() as send:
        soak = SoakEngine(job, send)
        seconds = time.perf_counter() - start
        send("started", seconds=seconds, requests=len(job.requests))
        try:
            end = soak.run()
        except Exception:
            soak.report()
            raise
        send("end", end=end.model_dump(mode="json"))


if __name__ == "__main__":
    main()
