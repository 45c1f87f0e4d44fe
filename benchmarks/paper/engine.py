"""The process in which all trees of a method run: reads a task on stdin."""

from __future__ import annotations

import os
import statistics
import sys
from typing import Any

from vllm import SamplingParams
from vllm.inputs import tokens_input

from benchmarks.paper.experiments import (
    Run,
    Scores,
    StoredRun,
    Task,
    read_run,
    store,
)
from vllm_treespec.compare import Cell
from vllm_treespec.compare_engine import SideEngine


class PaperEngine(SideEngine):
    """A method's engine that goes from tree to tree."""

    def __init__(self, task: Task) -> None:
        """Start the engine of the task."""
        super().__init__(task.job)
        self.task = task

    def run(self, run: Run) -> None:
        """Answer the prompts with the run's tree and store what came out."""
        if run.tree is not None:
            self.llm.collective_rpc("treespec_use", args=(run.tree.shape,))
        batch_size = self.job.cells[0].batch_size
        result = self.measure(Cell(batch_size=batch_size, temperature=run.temperature))
        content = StoredRun(
            run=run,
            settings=self.task.settings,
            commit=self.task.commit,
            seed=self.job.seed,
            result=result,
        )
        store(self.task.folder / "runs" / f"{run.name}.json", content)

    def rescore(self, run: Run) -> None:
        """Store the mean log-likelihoods of a run's answers at temperature 1."""
        name = f"{run.name}.json"
        stored = read_run(self.task.folder / "runs" / name)
        answers = stored.result.token_ids
        prompts = [prompt["prompt_token_ids"] for prompt in self.prompts]
        both = zip(prompts, answers, strict=True)
        params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
        outputs = self.llm.generate(
            [tokens_input(prompt + answer) for prompt, answer in both],
            params,
            use_tqdm=False,
        )
        means = []
        for output, answer in zip(outputs, answers, strict=True):
            found: Any = output.prompt_logprobs
            steps = zip(found[-len(answer) :], answer, strict=True)
            means.append(statistics.fmean(step[token].logprob for step, token in steps))
        store(self.task.folder / "scores" / name, Scores(mean_logprobs=means))


def main() -> None:
    """Run the task on stdin; what vLLM prints goes to stderr, finished runs to
    stdout."""
    task = Task.model_validate_json(sys.stdin.read())
    with os.fdopen(os.dup(1), "w") as finished:
        os.dup2(2, 1)
        engine = PaperEngine(task)
        for run in task.runs:
            if task.rescore:
                engine.rescore(run)
            else:
                engine.run(run)
            verb = "scored" if task.rescore else "finished"
            print(f"{verb} {run.name}", file=finished, flush=True)


if __name__ == "__main__":
    main()
