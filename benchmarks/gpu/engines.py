"""Engines of random weights in processes of their own: ours and both plain ones."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, Field
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
)

from benchmarks.gpu.cells import CellFolder, StoredCell
from benchmarks.gpu.shapes import SHAPES, write_config
from vllm_treespec.tools.launch import EngineError, engine_environment, failure

ENGINE = "benchmarks.gpu.engine"
PLAIN_DEFAULT, PLAIN_SYNC = "plain-default", "plain-v1-sync"
SIDES_NOTE = (
    "plain-default: vLLM as it comes (V2 model runner, asynchronous scheduling, its "
    "own engine process). plain-v1-sync: V1 model runner without asynchronous "
    "scheduling, in one process. ours-N: trees of N nodes, root included, V1 model "
    "runner, in one process; ours-1 drafts nothing."
)


class EngineSide(BaseModel):
    """One way to run vLLM."""

    name: str
    # nodes of every tree, root included; 0: plain vLLM
    nodes: int = 0
    engine: dict[str, Any] = Field(default_factory=dict)
    environment: dict[str, str] = Field(default_factory=dict)
    one_process: bool = True


class Work(BaseModel):
    """What an engine is to measure at once."""

    # name of the cell
    name: str
    # "steps": a window of steps in which all requests decode; "answers": all of it
    kind: Literal["steps", "answers"]
    batch: int
    # tokens of each prompt
    context: int
    # probability to accept a node once its parent is accepted; ours only
    acceptance: float | None = None
    # timed steps, or tokens of each answer
    count: int
    temperature: float = 0.0


class Task(BaseModel):
    """What one engine process is told to do."""

    side: EngineSide
    shape: str
    # folder with the model's config
    model: str
    dtype: str
    device: str
    work: list[Work]
    out: Path
    settings: str
    commit: str | None


class EngineCell(StoredCell):
    """What one engine did at one batch size."""

    shape: str
    side: str
    nodes: int
    work: Work
    seconds: float
    # of the engine; None: not counted
    steps: int | None
    num_tokens: int
    # milliseconds per step of the target's layers and its output layer, by the
    # device's own clock; empty where they were not timed
    forward_ms: dict[str, float] = Field(default_factory=dict)
    # milliseconds per step, by the host's clock; ours only
    stage_ms: dict[str, float] = Field(default_factory=dict)
    # mean emitted tokens per step of a request that had a tree
    acceptance_length: float | None = None
    # model runner, scheduling, graphs and attention that vLLM chose
    chosen: dict[str, str] = Field(default_factory=dict)

    @property
    def step_ms(self) -> float | None:
        """Milliseconds per step."""
        return 1000 * self.seconds / self.steps if self.steps else None

    @property
    def tokens_per_s(self) -> float:
        """Emitted tokens of all requests over wall time."""
        return self.num_tokens / self.seconds

    @property
    def outside_ms(self) -> float | None:
        """Milliseconds per step in which no forward of the target ran."""
        if self.step_ms is None or not self.forward_ms:
            return None
        return self.step_ms - sum(self.forward_ms.values())


@dataclass(frozen=True)
class Options:
    """What is the same in all cells of a benchmark."""

    # tokens of each prompt
    context: int
    # timed steps, or tokens of each answer
    count: int
    temperature: float
    # more arguments of vLLM
    extra: dict[str, Any]
    dtype: str = "bfloat16"
    device: str = "cuda"

    def work(
        self,
        name: str,
        kind: Literal["steps", "answers"],
        batch: int,
        acceptance: float | None,
    ) -> Work:
        """Work of one cell."""
        return Work(
            name=name,
            kind=kind,
            batch=batch,
            context=self.context,
            acceptance=acceptance,
            count=self.count,
            temperature=self.temperature,
        )


def tasks_of(
    shape: str,
    work: Mapping[str, Sequence[Work]],
    sides: Sequence[EngineSide],
    options: Options,
    folder: CellFolder[EngineCell],
    commit: str | None,
) -> list[Task]:
    """Engines of one shape that have cells left to do.

    Args:
        shape: of the model.
        work: of each side, by its name.
        sides: in the order in which they are to run.
        options: what all cells share.
        folder: where finished cells are.
        commit: to note.

    """
    out = folder.folder.parent
    tasks = []
    for side in sides:
        missing = folder.missing(part.name for part in work[side.name])
        if not missing:
            continue
        tasks.append(
            Task(
                side=side.model_copy(update={"engine": side.engine | options.extra}),
                shape=shape,
                model=str(write_config(SHAPES[shape], out / "models" / shape)),
                dtype=options.dtype,
                device=options.device,
                work=[part for part in work[side.name] if part.name in missing],
                out=out,
                settings=str(folder.settings),
                commit=commit,
            )
        )
    return tasks


def plain_sides() -> list[EngineSide]:
    """Both honest baselines."""
    return [
        EngineSide(
            name=PLAIN_SYNC,
            engine={"async_scheduling": False},
            environment={"VLLM_USE_V2_MODEL_RUNNER": "0"},
        ),
        EngineSide(name=PLAIN_DEFAULT, one_process=False),
    ]


def our_side(nodes: int) -> EngineSide:
    """Side of trees of that many nodes."""
    return EngineSide(name=f"ours-{nodes}", nodes=nodes)


def run_tasks(tasks: Sequence[Task], console: Console) -> dict[str, str]:
    """Run engine processes, one after the other; returns why some failed, by name."""
    failed: dict[str, str] = {}
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console) as bar:
        cells = bar.add_task("starting", total=sum(len(t.work) for t in tasks))
        for task in tasks:
            name = f"{task.shape}-{task.side.name}"
            bar.update(cells, description=f"{name} (engine starts)")

            def finished(cell: str) -> None:
                bar.update(cells, description=cell, advance=1)

            try:
                run_task(task, finished)
            except EngineError as error:
                failed[name] = str(error)
                bar.console.print(f"failed: {name}: {error}", markup=False)
    return failed


def run_task(task: Task, on_cell: Callable[[str], None]) -> None:
    """Run one engine process, which stores its cells itself.

    Args:
        task: goes to the process's stdin.
        on_cell: called with the name of each cell that it has stored.

    Raises:
        EngineError: one line that says why the engine ended early.

    """
    log = task.out / "logs" / f"{task.shape}-{task.side.name}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    environment = {
        **engine_environment(task.side.one_process),
        **task.side.environment,
    }
    with (
        log.open("w", encoding="utf-8") as stream,
        subprocess.Popen(
            [sys.executable, "-m", ENGINE],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stream,
            text=True,
            env=environment,
        ) as process,
    ):
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(task.model_dump_json())
        process.stdin.close()
        for line in process.stdout:
            on_cell(line.strip())
    if process.returncode != 0:
        raise EngineError(failure(process.returncode, log))
