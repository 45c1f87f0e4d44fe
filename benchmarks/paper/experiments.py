"""What experiments 1 and 2 run, and which of it is finished.

One engine per method answers the prompts with all trees of the method, one after the
other; plain autoregressive decoding has an engine of its own, and so has the rescoring
of all answers under the target. A finished tree at a temperature is one file.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel

from benchmarks.paper.trees import Tree
from benchmarks.tasks import EngineTask, Finished, Scores, read_runs, try_task
from vllm_treespec.tools.sides import PLAIN, Cell, CellResult, Job, Side, plain_side

ENGINE = "benchmarks.paper.engine"

# For estimates; origin: a 135M target on two cores.
START_S = 20.0
RESCORED_TOKENS_PER_S = 500.0
PROMPT_TOKENS = 60
WARM_UP_TOKENS = 16


class Run(BaseModel):
    """One side at one temperature in one round; without a tree: plain decoding."""

    tree: Tree | None
    temperature: float
    round: int

    @property
    def method(self) -> str:
        """Name of the method, or "plain"."""
        return self.tree.method if self.tree else PLAIN

    @property
    def side(self) -> str:
        """Name of the tree, or "plain"."""
        return self.tree.name if self.tree else PLAIN

    @property
    def name(self) -> str:
        """Name of its files."""
        return f"{self.side}.t{self.temperature:g}.{self.round}"


class StoredRun(Finished):
    """A finished run in the output folder."""

    run: Run
    seed: int
    result: CellResult


class Task(EngineTask):
    """What one engine process is told to do, in this order."""

    runs: list[Run]


@dataclass(frozen=True)
class Plan:
    """What to run and where the results go."""

    trees: list[Tree]
    temperatures: list[float]
    rounds: int
    plain_rounds: int
    prompts: list[str]
    target: str
    draft: str
    max_tokens: int
    batch_size: int
    out: Path
    # SHA-256 of the weights and the like, part of the settings
    models: str
    commit: str | None

    @property
    def settings(self) -> str:
        """Tell results of other settings apart."""
        told = (self.models, self.prompts, self.max_tokens, self.batch_size)
        return hashlib.sha256(repr(told).encode()).hexdigest()[:16]

    def runs(self) -> list[Run]:
        """All runs, plain first, one method after the other; none without trees."""
        sides = (None, *self.trees) if self.trees else ()
        return [
            Run(tree=tree, temperature=temperature, round=round_)
            for tree in sides
            for temperature in self.temperatures
            for round_ in range(self.rounds if tree else self.plain_rounds)
        ]

    def file(self, run: Run) -> Path:
        """File of a finished run."""
        return self.out / "runs" / f"{run.name}.json"

    def scores_file(self, run: Run) -> Path:
        """File of the scores of a finished run."""
        return self.out / "scores" / f"{run.name}.json"

    def todo(self) -> list[list[Run]]:
        """Runs that are not finished, those of one engine together."""
        left = [run for run in self.runs() if not self.file(run).is_file()]
        methods = dict.fromkeys(run.method for run in left)
        return [[run for run in left if run.method == m] for m in methods]

    def unscored(self) -> list[Run]:
        """Finished runs without scores."""
        return [
            run
            for run in self.runs()
            if self.file(run).is_file() and not self.scores_file(run).is_file()
        ]

    def side(self, runs: Sequence[Run]) -> Side:
        """Make the side whose engine can run these trees of one method."""
        trees = list(dict.fromkeys(run.tree for run in runs if run.tree))
        if not trees:
            return plain_side(PLAIN, eager=True)
        largest = max(trees, key=lambda tree: tree.num_drafts)
        spec = largest.spec_config(self.draft)
        spec["schedule"] = [
            {"batch_size": i, **tree.shape} for i, tree in enumerate(trees, 1)
        ]
        return Side(
            name=largest.method,
            family=largest.method,
            engine={"enforce_eager": True, "speculative_config": spec},
            budget=largest.num_drafts,
        )

    def task(self, runs: Sequence[Run], rescore: bool = False) -> Task:
        """Describe the work of one engine process.

        The seed differs between engines and also when broken-off work goes on, so that
        no two trees share random numbers.
        """
        side = plain_side("rescoring", eager=True) if rescore else self.side(runs)
        job = Job(
            side=side,
            target=self.target,
            prompts=self.prompts,
            cells=[Cell(batch_size=self.batch_size, temperature=runs[0].temperature)],
            max_tokens=self.max_tokens,
            seed=zlib.crc32(runs[0].name.encode()),
        )
        return Task(
            job=job,
            runs=list(runs),
            folder=self.out,
            settings=self.settings,
            commit=self.commit,
            rescore=rescore,
        )

    def seconds(self) -> float:
        """Estimate of what is left to run."""
        left = [run for runs in self.todo() for run in runs]
        answers = len(self.prompts) * (len(left) + len(self.unscored()))
        starts = START_S * (len(self.todo()) + bool(answers))
        generating = sum(self.run_seconds(run) for run in left)
        rescoring = answers * (self.max_tokens + PROMPT_TOKENS) / RESCORED_TOKENS_PER_S
        return starts + generating + rescoring

    def run_seconds(self, run: Run) -> float:
        """Rough time of one run without the engine's start, warm-up included.

        Origin of the numbers: a 135M target and an 11M draft model on two cores.
        """
        drafts, depth = (run.tree.num_drafts, run.tree.depth) if run.tree else (0, 0)
        step_ms = 15 + self.batch_size * (4 + 1.2 * drafts) + 3.5 * depth
        emitted = self.batch_size * (1.6 if run.tree else 1.0)
        tokens = len(self.prompts) * self.max_tokens + WARM_UP_TOKENS * self.batch_size
        return tokens / emitted * step_ms / 1000


def execute(plan: Plan) -> dict[str, str]:
    """Run what is to do and rescore it; returns why engines failed, by name."""
    failed: dict[str, str] = {}
    for runs in plan.todo():
        try_task(plan.task(runs), ENGINE, failed)
    if runs := plan.unscored():
        try_task(plan.task(runs, rescore=True), ENGINE, failed)
    return failed


def finished_runs(plan: Plan) -> list[StoredRun]:
    """Read the plan's finished runs.

    Raises:
        ValueError: when one was made with other settings.

    """
    files = (plan.file(run) for run in plan.runs())
    existing = (file for file in files if file.is_file())
    return read_runs(existing, StoredRun, lambda _: plan.settings)


def finished_scores(plan: Plan) -> dict[str, list[float]]:
    """Mean log-likelihoods of the answers, by name of the run."""
    return {
        run.name: Scores.model_validate_json(path.read_text()).mean_logprobs
        for run in plan.runs()
        if (path := plan.scores_file(run)).is_file()
    }
