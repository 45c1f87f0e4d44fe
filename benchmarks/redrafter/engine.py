"""The process in which all runs of a side happen: reads a task on stdin."""

from __future__ import annotations

import itertools
import os
import sys
import time

from vllm.inputs import TokensInput
from vllm.outputs import RequestOutput
from vllm.sampling_params import RequestOutputKind

from benchmarks.redrafter.chains import use_chains
from benchmarks.redrafter.experiments import StoredRun, Task, file_name
from benchmarks.redrafter.parts import Run
from benchmarks.rescoring import mean_logprobs
from benchmarks.tasks import Scores, store
from vllm_treespec.tools.side_engine import SideEngine
from vllm_treespec.tools.sides import Cell, CellResult


class HeadEngine(SideEngine):
    """A side's engine that goes from run to run."""

    def __init__(self, task: Task) -> None:
        """Start the engine of the task."""
        super().__init__(task.job)
        self.task = task
        self.all_prompts = self.prompts

    def run(self, run: Run, round_: int) -> None:
        """Answer the prompts as the run says and store what came out.

        Prompts are repeated where a batch is larger than their number.
        """
        num_requests = max(len(self.all_prompts), run.batch_size)
        self.prompts = list(
            itertools.islice(itertools.cycle(self.all_prompts), num_requests)
        )
        self.job = self.task.job.model_copy(update={"max_tokens": run.max_tokens})
        stored = StoredRun(
            run=run,
            round=round_,
            settings=self.task.settings,
            commit=self.task.commit,
            seed=self.job.seed,
            result=self.measured(run) if run.tree is None else self.drafted(run),
        )
        if run.tree is not None:
            [totals] = self.llm.collective_rpc("treespec_stats")
            stored.node_counts = totals["node_counts"]
        if run.traced:
            stored.step_tokens = self.step_tokens
        store(self.task.folder / "runs" / file_name(run, round_), stored)

    def drafted(self, run: Run) -> CellResult:
        """Measure with the run's tree."""
        self.llm.collective_rpc("treespec_use", args=(run.tree,))
        self.llm.collective_rpc(use_chains, args=(not run.tree_attention,))
        result = self.traced(run) if run.traced else self.measured(run)
        self.llm.collective_rpc(use_chains, args=(False,))
        return result

    def measured(self, run: Run) -> CellResult:
        """Measure without looking at single steps."""
        return self.measure(
            Cell(batch_size=run.batch_size, temperature=run.temperature)
        )

    def traced(self, run: Run) -> CellResult:
        """Answer one prompt after the other and note the tokens of every step."""
        before = self.read_counters()
        start = time.perf_counter()
        steps = [self.steps(prompt, run) for prompt in self.prompts]
        result = CellResult(
            cell=Cell(batch_size=1, temperature=run.temperature),
            seconds=time.perf_counter() - start,
            num_tokens=[sum(map(len, answer)) for answer in steps],
            tpot_ms=[None] * len(steps),
            token_ids=[list(itertools.chain(*answer)) for answer in steps],
        )
        self.add_acceptance(result, before)
        self.step_tokens = [list(map(len, answer)) for answer in steps]
        return result

    def steps(self, prompt: TokensInput, run: Run) -> list[list[int]]:
        """Token ids of every step of an answer."""
        params = self.params(run.temperature, run.max_tokens)
        params.output_kind = RequestOutputKind.DELTA
        engine = self.llm.llm_engine
        engine.add_request(f"traced-{self.num_requests}", prompt, params)
        self.num_requests += 1
        steps = []
        while engine.has_unfinished_requests():
            for output in engine.step():
                assert isinstance(output, RequestOutput)
                steps.append(list(output.outputs[0].token_ids))
        return steps

    def rescore(self, run: Run, round_: int) -> None:
        """Store the mean log-likelihoods of a run's answers at temperature 1."""
        name = file_name(run, round_)
        text = (self.task.folder / "runs" / name).read_text(encoding="utf-8")
        answers = StoredRun.model_validate_json(text).result.token_ids
        scores = Scores(mean_logprobs=mean_logprobs(self, answers))
        store(self.task.folder / "scores" / name, scores)


def main() -> None:
    """Run the task on stdin; what vLLM prints goes to stderr, finished runs to
    stdout."""
    task = Task.model_validate_json(sys.stdin.read())
    with os.fdopen(os.dup(1), "w") as finished:
        os.dup2(2, 1)
        engine = HeadEngine(task)
        for run, round_ in zip(task.runs, task.rounds, strict=True):
            if task.rescore:
                engine.rescore(run, round_)
            else:
                engine.run(run, round_)
            verb = "scored" if task.rescore else "finished"
            print(f"{verb} {run.name}", file=finished, flush=True)


if __name__ == "__main__":
    main()
