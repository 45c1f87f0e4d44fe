"""Engine processes that do one run after the other, each kept in a file.

A broken-off benchmark goes on where it stopped: what is in a file is not run again.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel

from vllm_treespec.tools.launch import EngineError, engine_environment, failure
from vllm_treespec.tools.sides import Job


class EngineTask(BaseModel):
    """What one engine process is told to do; subclasses name the runs."""

    job: Job
    folder: Path
    settings: str
    commit: str | None
    # read the runs' stored answers and score them, instead of generating
    rescore: bool = False


class Finished(BaseModel):
    """A finished run in the output folder."""

    # of everything that decides the result
    settings: str
    commit: str | None


class Scores(BaseModel):
    """Mean log-likelihood per token of a run's answers under the target."""

    mean_logprobs: list[float]


Run = TypeVar("Run", bound=Finished)


def run_task(task: EngineTask, module: str) -> None:
    """Run one engine process, which stores its results and prints their names.

    Args:
        task: goes to the process's stdin.
        module: run with ``python -m``.

    Raises:
        EngineError: one line that says why the engine ended early.

    """
    log = task.folder / "logs" / f"{task.job.side.name}.{task.job.seed}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w", encoding="utf-8") as stream:
        process = subprocess.run(
            [sys.executable, "-m", module],
            input=task.model_dump_json(),
            stderr=stream,
            text=True,
            env=engine_environment(one_process=True),
            check=False,
        )
    if process.returncode != 0:
        reason = failure(process.returncode, log)
        raise EngineError(f"{task.job.side.name}: {reason}")


def try_task(task: EngineTask, module: str, failed: dict[str, str]) -> None:
    """Run one engine process; note by side why when it fails, the others go on."""
    try:
        run_task(task, module)
    except EngineError as error:
        failed[task.job.side.name] = str(error)


def store(path: Path, content: BaseModel) -> None:
    """Write a file that appears complete or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text(content.model_dump_json(), encoding="utf-8")
    partial.rename(path)


def read_runs(
    paths: Iterable[Path],
    kind: type[Run],
    settings: Callable[[Run], str],
    remedy: str = "name another --out",
) -> list[Run]:
    """Read finished runs.

    Args:
        paths: their files.
        kind: what they hold.
        settings: what a run's settings must be.
        remedy: what to do about a run of other settings.

    Raises:
        ValueError: when one was made with other settings.

    """
    runs = []
    for path in paths:
        run = kind.model_validate_json(path.read_text(encoding="utf-8"))
        if run.settings != settings(run):
            raise ValueError(f"{path} was made with other settings; {remedy}")
        runs.append(run)
    return runs
