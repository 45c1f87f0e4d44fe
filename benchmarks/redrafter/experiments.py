"""Which runs are finished, and which engine processes do the others.

In every round each side has one engine, which goes from run to run; another scores all
answers of the tables under the target.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import Field

from benchmarks.redrafter.parts import (
    FIGURE6_BATCH_SIZES,
    SIDES,
    TABLES,
    Entry,
    Run,
    distinct,
    head_of,
)
from benchmarks.tasks import EngineTask, Finished, Scores, read_runs, try_task
from vllm_treespec.tools.sides import PLAIN, Cell, CellResult, Job, Side, plain_side

ENGINE = "benchmarks.redrafter.engine"
# For estimates; origin: a 135M target on two cores.
START_S = {True: 20.0, False: 55.0}
RESCORED_TOKENS_PER_S = 500.0
PROMPT_TOKENS = 60


class StoredRun(Finished):
    """A finished run in the output folder."""

    run: Run
    round: int
    seed: int
    result: CellResult
    # how many trees had so many nodes, roots included
    node_counts: dict[int, int] = Field(default_factory=dict)
    # of a traced run, per answer: tokens that each step emitted, the prompt's first
    step_tokens: list[list[int]] = Field(default_factory=list)


class Task(EngineTask):
    """What one engine process is told to do, in this order."""

    runs: list[Run]
    # number of the round; rescoring: of each run
    rounds: list[int]


@dataclass(frozen=True)
class Plan:
    """What to run and where the results go."""

    entries: list[Entry]
    rounds: int
    prompts: list[str]
    target: str
    # folders of the heads, by kind
    heads: dict[str, str]
    eager: bool
    out: Path
    # name and SHA-256 of the weights of "target" and of the heads, by kind
    models: dict[str, dict[str, str]]
    commit: str | None

    @property
    def runs(self) -> list[Run]:
        """All runs, each once."""
        return distinct(self.entries)

    @property
    def scored(self) -> list[Run]:
        """Runs whose answers are scored: those of the tables."""
        return distinct([e for e in self.entries if e.part in TABLES])

    def settings(self, side: str) -> str:
        """Tell results of other settings apart; a side has one head at most."""
        head = self.models.get(head_of(side))
        told = (self.models["target"], head, self.prompts, self.eager)
        return hashlib.sha256(repr(told).encode()).hexdigest()[:16]

    def file(self, run: Run, round_: int) -> Path:
        """File of a finished run."""
        return self.out / "runs" / file_name(run, round_)

    def scores_file(self, run: Run, round_: int) -> Path:
        """File of the scores of a finished run."""
        return self.out / "scores" / file_name(run, round_)

    def todo(self) -> list[tuple[int, list[Run]]]:
        """Runs that are not finished, round by round, those of one engine together."""
        tasks = []
        for round_ in range(self.rounds):
            left = [run for run in self.runs if not self.file(run, round_).is_file()]
            for side in SIDES:
                if runs := [run for run in left if run.side == side]:
                    tasks.append((round_, runs))
        return tasks

    def unscored(self) -> list[tuple[Run, int]]:
        """Finished runs whose answers are to be scored."""
        return [
            (run, round_)
            for run in self.scored
            for round_ in range(self.rounds)
            if self.file(run, round_).is_file()
            and not self.scores_file(run, round_).is_file()
        ]

    def side(self, name: str) -> Side:
        """Make the side whose engine can run all its trees."""
        if name == PLAIN:
            return plain_side(name, eager=self.eager)
        trees = {run.name: run.tree for run in self.runs if run.side == name}
        shapes = list({str(tree): tree for tree in trees.values() if tree}.values())
        spec = {**SIDES[name], "model": self.heads[head_of(name)]}
        spec["schedule"] = [
            {"batch_size": i, **shape} for i, shape in enumerate(shapes, 1)
        ]
        return Side(
            name=name,
            family=spec["method"],
            engine={"enforce_eager": self.eager, "speculative_config": spec},
        )

    def task(self, round_: int, runs: Sequence[Run]) -> Task:
        """Describe the work of one engine process."""
        return self._task(self.side(runs[0].side), runs, [round_] * len(runs))

    def rescoring(self) -> Task:
        """Describe the engine process that scores answers."""
        runs, rounds = zip(*self.unscored(), strict=True)
        side = plain_side("rescoring", eager=True)
        return self._task(side, runs, rounds, rescore=True)

    def _task(
        self,
        side: Side,
        runs: Sequence[Run],
        rounds: Sequence[int],
        rescore: bool = False,
    ) -> Task:
        """The seed differs between engines and also when broken-off work goes on."""
        job = Job(
            side=side,
            target=self.target,
            prompts=self.prompts,
            # every engine is set up for the largest batch
            cells=[Cell(batch_size=max(FIGURE6_BATCH_SIZES), temperature=0.0)],
            max_tokens=runs[0].max_tokens,
            seed=zlib.crc32(file_name(runs[0], rounds[0]).encode()),
        )
        return Task(
            job=job,
            runs=list(runs),
            rounds=list(rounds),
            folder=self.out,
            settings=self.settings(runs[0].side),
            commit=self.commit,
            rescore=rescore,
        )

    def seconds(self) -> float:
        """Estimate of what is left to run."""
        todo = self.todo()
        generating = sum(self.run_seconds(run) for _, runs in todo for run in runs)
        answers = len(self.prompts) * sum(
            not self.scores_file(run, round_).is_file()
            for run in self.scored
            for round_ in range(self.rounds)
        )
        tokens = max((run.max_tokens for run in self.scored), default=0)
        rescoring = answers * (tokens + PROMPT_TOKENS) / RESCORED_TOKENS_PER_S
        starts = START_S[self.eager] * len(todo) + START_S[True] * bool(answers)
        return starts + generating + rescoring

    def run_seconds(self, run: Run) -> float:
        """Rough time of one run without the engine's start.

        Origin of the numbers: a 135M target on two cores; a row of the target's
        forward costs 0.7 ms from the seventh on, a level of the head 1 ms.
        """
        tree = run.tree or {}
        drafts = tree.get("num_drafts", run.num_candidates)
        rows = run.batch_size * (1 + drafts)
        step_ms = 15 + 0.7 * max(rows - 6, 0) + (6.0 if drafts else 0.0)
        answers = max(len(self.prompts), run.batch_size)
        emitted = run.batch_size * (2.0 if drafts else 1.0)
        return answers * run.max_tokens / emitted * step_ms / 1000


def file_name(run: Run, round_: int) -> str:
    """Name of the files of a run in a round."""
    return f"{run.name}.{round_}.json"


def execute(plan: Plan, after_task: Callable[[dict[str, str]], None]) -> dict[str, str]:
    """Run what is to do and score it; returns why engines failed, by side.

    A side that failed is left out of later rounds; the others go on. `after_task` is
    called with the failures so far whenever an engine has ended.
    """
    failed: dict[str, str] = {}
    for round_, runs in plan.todo():
        if runs[0].side not in failed:
            try_task(plan.task(round_, runs), ENGINE, failed)
            after_task(failed)
    if plan.unscored():
        try_task(plan.rescoring(), ENGINE, failed)
    return failed


def finished_runs(plan: Plan) -> list[StoredRun]:
    """Read the plan's finished runs.

    Raises:
        ValueError: when one was made with other settings.

    """
    files = (
        plan.file(run, round_) for run in plan.runs for round_ in range(plan.rounds)
    )
    existing = (file for file in files if file.is_file())
    return read_runs(existing, StoredRun, lambda stored: plan.settings(stored.run.side))


def finished_scores(plan: Plan, runs: Sequence[StoredRun]) -> dict[str, list[float]]:
    """Mean log-likelihoods of answers, by the name of the run's file."""
    found = {}
    for stored in runs:
        path = plan.scores_file(stored.run, stored.round)
        if path.is_file():
            scores = Scores.model_validate_json(path.read_text(encoding="utf-8"))
            found[path.name] = scores.mean_logprobs
    return found
