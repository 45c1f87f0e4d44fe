"""The process in which all trees of a method run: reads a task on stdin."""

from __future__ import annotations

import os
import sys

from benchmarks.paper.experiments import Run, StoredRun, Task
from benchmarks.rescoring import mean_logprobs
from benchmarks.tasks import Scores, store
from vllm_treespec.tools.side_engine import SideEngine
from vllm_treespec.tools.sides import Cell


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
