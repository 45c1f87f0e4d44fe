"""The process in which one side runs: reads a job on stdin, reports JSON lines."""

from __future__ import annotations

import itertools
import pkgutil
import sys
import time
from typing import Any

from vllm import LLM, SamplingParams
from vllm.inputs import TokensInput, tokens_input
from vllm.outputs import RequestOutput
from vllm.sampling_params import RequestOutputKind
from vllm.v1.metrics.reader import Counter, Vector

from vllm_treespec.config import names_our_method
from vllm_treespec.tools.launch import READY, Send, reporting
from vllm_treespec.tools.prompts import chat_tokens
from vllm_treespec.tools.sides import PLAIN, Acceptance, Cell, CellResult, Job

WARM_UP_TOKENS = 16
# seconds between two pieces of a streamed answer
PIECE_S = 0.1
# of all sides when prompts stay in the prefix cache, which holds whole blocks
CACHED_BLOCK_SIZE = 32
DRAFTS = "vllm:spec_decode_num_drafts"
DRAFT_TOKENS = "vllm:spec_decode_num_draft_tokens"
ACCEPTED_BY_POSITION = "vllm:spec_decode_num_accepted_tokens_per_pos"


class SideEngine:
    """One side's engine with the prompts of its job."""

    def __init__(self, job: Job) -> None:
        """Start the engine and tokenise the prompts through the chat template."""
        self.job = job
        self.has_trees = names_our_method({"method": job.side.family})
        cached = {"enable_prefix_caching": True, "block_size": CACHED_BLOCK_SIZE}
        engine = {
            "model": job.target,
            "dtype": job.dtype,
            "max_model_len": job.max_model_len,
            "seed": job.seed,
            "disable_log_stats": False,
            **(cached if job.workloads else {"enable_prefix_caching": False}),
            "max_num_seqs": max(cell.batch_size for cell in job.cells),
            **job.side.engine,
        }
        self.llm = LLM(**engine)
        self.defaults: dict[str, Any] = {}
        if job.model_defaults:
            self.defaults = self.llm.model_config.get_diff_sampling_param()
        self.prompts = [self.tokenise(prompt) for prompt in job.prompts]
        self.workloads = {
            name: [self.tokenise(prompt) for prompt in prompts]
            for name, prompts in job.workloads.items()
        }
        self.num_requests = 0
        # batch sizes and temperatures
        self.warm: set[tuple[int, float]] = set()

    def tokenise(self, prompt: str) -> TokensInput:
        """Tokens of a conversation that asks for an answer to the prompt."""
        return tokens_input(chat_tokens(self.llm.get_tokenizer(), prompt))

    def params(
        self, temperature: float, max_tokens: int, **more: Any
    ) -> SamplingParams:
        """Sampling as in every cell; outputs come when they are finished."""
        given = {
            "top_p": self.job.top_p,
            "repetition_penalty": self.job.repetition_penalty,
        }
        of_cell = {
            "temperature": temperature,
            "max_tokens": max_tokens,
            "output_kind": RequestOutputKind.FINAL_ONLY,
        }
        named = {name: value for name, value in given.items() if value}
        return SamplingParams(**{**self.defaults, **named, **of_cell, **more})

    def new_id(self) -> str:
        """Name a request."""
        self.num_requests += 1
        return str(self.num_requests)

    def generate(
        self, prompts: list[TokensInput], params: SamplingParams, batch_size: int
    ) -> list[RequestOutput]:
        """Answer the prompts, with ``batch_size`` requests in the engine at a time."""
        engine = self.llm.llm_engine
        finished: dict[str, RequestOutput] = {}
        ids = [self.new_id() for _ in prompts]
        added = 0
        while len(finished) < len(prompts):
            while added < len(prompts) and added - len(finished) < batch_size:
                engine.add_request(ids[added], prompts[added], params)
                added += 1
            for output in engine.step():
                assert isinstance(output, RequestOutput)
                finished[output.request_id] = output
        return [finished[i] for i in ids]

    def measure(self, cell: Cell) -> CellResult:
        """Measure a cell with its tree, by its own function if it names one."""
        if cell.tree is not None:
            self.llm.collective_rpc("treespec_use", args=(cell.tree,))
        if cell.measure:
            result: CellResult = pkgutil.resolve_name(cell.measure)(self, cell)
            return result
        return self.time_answers(cell)

    def prompts_of(self, cell: Cell) -> list[TokensInput]:
        """Prompts of a cell, repeated where it has more than there are."""
        prompts = self.workloads[cell.workload] if cell.workload else self.prompts
        count = len(prompts) if cell.num_prompts is None else cell.num_prompts
        return list(itertools.islice(itertools.cycle(prompts), count))

    def warm_up(self, cell: Cell) -> None:
        """Answer some prompts where batch size and temperature are new.

        Prompts of workloads are read into the prefix cache, which they may have left.
        """
        if self.job.workloads:
            reading = self.params(0.0, max_tokens=1)
            self.generate(self.prompts_of(cell), reading, cell.batch_size)
        if (cell.batch_size, cell.temperature) not in self.warm:
            self.warm.add((cell.batch_size, cell.temperature))
            prompts = self.prompts_of(cell)[: cell.batch_size]
            params = self.params(cell.temperature, WARM_UP_TOKENS)
            self.generate(prompts, params, cell.batch_size)

    def time_answers(self, cell: Cell) -> CellResult:
        """Warm up, then time the answers to the prompts."""
        prompts = self.prompts_of(cell)
        self.warm_up(cell)
        max_tokens = cell.max_tokens or self.job.max_tokens
        params = self.params(cell.temperature, max_tokens, **cell.params)
        before = self.read_counters()
        start, cpu_start = time.perf_counter(), time.thread_time()
        outputs = self.generate(prompts, params, cell.batch_size)
        seconds = time.perf_counter() - start
        cpu_seconds = time.thread_time() - cpu_start
        result = CellResult(
            cell=cell,
            seconds=seconds,
            cpu_seconds=cpu_seconds,
            num_tokens=[len(output.outputs[0].token_ids) for output in outputs],
            tpot_ms=[tpot_ms(output) for output in outputs],
            token_ids=[list(output.outputs[0].token_ids) for output in outputs],
        )
        self.add_acceptance(result, before)
        return result

    def read_counters(self) -> list[int]:
        """Stock counters: drafts, draft tokens, then accepted by position; for our
        methods, start the worker's totals anew instead."""
        if self.has_trees:
            self.llm.collective_rpc("treespec_stats", kwargs={"reset": True})
            return []
        if self.job.side.family == PLAIN:
            return []
        counts = {DRAFTS: 0, DRAFT_TOKENS: 0}
        by_position: list[int] = []
        for metric in self.llm.get_metrics():
            if isinstance(metric, Counter) and metric.name in counts:
                counts[metric.name] = metric.value
            elif isinstance(metric, Vector) and metric.name == ACCEPTED_BY_POSITION:
                by_position = metric.values
        return [counts[DRAFTS], counts[DRAFT_TOKENS], *by_position]

    def add_acceptance(self, result: CellResult, before: list[int]) -> None:
        """Add what was accepted since ``before`` and, for ours, the stages' times."""
        if self.has_trees:
            totals = self.llm.collective_rpc("treespec_stats")[0]
            accepted = {int(d): count for d, count in totals["accepted"].items()}
            result.acceptance = Acceptance.from_histogram(
                totals["trees"], totals["nodes"], accepted
            )
            result.steps = totals["steps"]
            result.stage_seconds = totals["seconds"]
            result.mode_steps = totals["modes"]
            result.mode_seconds = totals["mode_seconds"]
            result.mode_tokens = totals["mode_tokens"]
        elif self.job.side.family != PLAIN:
            after = self.read_counters()
            before += [0] * (len(after) - len(before))
            drafts, tokens, *at_least = [
                new - old for new, old in zip(after, before, strict=True)
            ]
            result.acceptance = Acceptance(
                trees=drafts, nodes=drafts + tokens, at_least=at_least
            )

    def stream(self, prompt: str, send: Send) -> None:
        """Send the greedy answer piece by piece, each in a turn of its own."""
        tokens = self.tokenise(prompt)
        self.generate([tokens], self.params(0.0, WARM_UP_TOKENS), 1)
        kind = RequestOutputKind.DELTA
        params = self.params(0.0, self.job.max_tokens, output_kind=kind)
        engine = self.llm.llm_engine
        engine.add_request("stream", tokens, params)
        while engine.has_unfinished_requests():
            send(READY)
            pieces: list[Any] = []
            start = time.perf_counter()
            while (
                engine.has_unfinished_requests()
                and time.perf_counter() - start < PIECE_S
            ):
                pieces += [output.outputs[0] for output in engine.step()]
            send(
                "text",
                text="".join(piece.text for piece in pieces),
                num_tokens=sum(len(piece.token_ids) for piece in pieces),
                seconds=time.perf_counter() - start,
                ended=not engine.has_unfinished_requests(),
            )


def tpot_ms(output: RequestOutput, num_tokens: int | None = None) -> float | None:
    """Milliseconds per token after the first, None for an answer of one token.

    ``num_tokens`` must be given where the output holds the last tokens only.
    """
    stats: Any = output.metrics
    if num_tokens is None:
        num_tokens = len(output.outputs[0].token_ids)
    if num_tokens < 2:
        return None
    return 1000 * (stats.last_token_ts - stats.first_token_ts) / (num_tokens - 1)


def main() -> None:
    """Run the job on stdin and report each cell when it is measured."""
    job = Job.model_validate_json(sys.stdin.readline())
    start = time.perf_counter()
    with reporting() as send:
        engine = SideEngine(job)
        send("started", seconds=time.perf_counter() - start)
        if job.stream is not None:
            engine.stream(job.stream, send)
        for cell in job.cells:
            if job.in_turns:
                send(READY)
            send("cell", result=engine.measure(cell).model_dump(mode="json"))


if __name__ == "__main__":
    main()
