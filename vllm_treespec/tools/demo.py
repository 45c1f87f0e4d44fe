"""The demo: three kinds of work on a real model, plain and with draft trees.

The engines of all sides are in memory at once and take turns: a machine whose speed
changes is then as fast for one side as for the others.
"""

from __future__ import annotations

import shutil
import tempfile
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from operator import eq
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.live import Live
from rich.progress import track
from rich.table import Table
from rich.text import Text

from vllm_treespec.config import SpecConfigError
from vllm_treespec.schedule.processor import slow_arithmetic
from vllm_treespec.tools.assets import (
    REDRAFTER,
    AssetError,
    ensure_target,
    shipped_drafter,
)
from vllm_treespec.tools.demo_report import (
    Pair,
    advice,
    best_overall,
    busy,
    serve_command,
    speed_table,
)
from vllm_treespec.tools.launch import EngineError, Event, turn
from vllm_treespec.tools.load import check_model
from vllm_treespec.tools.prompts import SHIPPED_WORKLOADS, PromptError, load_workloads
from vllm_treespec.tools.sides import (
    PLAIN,
    Cell,
    CellResult,
    Job,
    Side,
    plain_side,
    results_of,
    seeded,
    side_events,
    tree_side,
)

SUFFIX: dict[str, Any] = {"method": "suffix_tree"}
HEAD: dict[str, Any] = {"method": "hybrid", "drafter": "redrafter"}
# Prompts repeat, and an answer is not to be drafted from an earlier one. Each run of
# the demo starts the same.
FRESH: dict[str, Any] = {"max_cached_tokens": 0, "schedule_cache": False}
MEASURED_WITHOUT = (
    "Measured with the default schedule, but without drafts from earlier answers "
    "(prompts repeat) and without times of earlier runs. The command below uses both."
)
TEMPERATURES = (0.0, 1.0)
# Prompts of each kind of work; how often each is answered at each temperature.
NUM_PROMPTS, ROUNDS = 3, 2
STREAM_TOKENS, SPEED_TOKENS, EXACT_TOKENS = 160, 32, 16
# Of the screen, beside the answers: of each column; below, and above with the cursor's.
BORDER_COLUMNS, BORDER_LINES = 4, 5

# Events of the engines, by the names of their sides.
Engines = dict[str, Iterator[Event]]


def main(
    target: str | None = None,
    head: str | None = None,
    prompts: Path | None = None,
) -> None:
    """Show and measure what draft trees gain, and that answers stay the same.

    Exits with status 1 and one line when a model is missing or an engine fails.
    """
    console = Console(highlight=False)
    try:
        # The head first: getting the target takes a download.
        head = head or shipped_drafter(REDRAFTER)
        in_every_step, sides = sides_of(head, "fixed"), sides_of(head, "measured")
        cells = cells_of(load_workloads(prompts or SHIPPED_WORKLOADS))
        model = target or str(ensure_target())
        check_model("--target", model)
        console.print(
            f"{Path(model).name} on stock vLLM, one request at a time. Engines run "
            "eager here to start fast; published figures are of compiled ones."
        )
        show_answers(console, in_every_step, model, cells)
        pairs = show_speeds(console, sides, model, cells)
    except (AssetError, EngineError, PromptError, SpecConfigError) as error:
        raise SystemExit(f"treespec demo: {error}") from None
    if reason := busy(pairs, rounds=ROUNDS):
        console.print(reason, style="bold red")
    else:
        for line in advice(pairs, shipped=target is None):
            console.print(line, markup=False)
    best = best_overall(pairs)
    console.print(f"To serve with {best}:", markup=False)
    [side] = [side for side in sides if side.name == best]
    console.print(serve_command(side, model), markup=False, soft_wrap=True)


def cells_of(workloads: Mapping[str, Sequence[str]]) -> list[Cell]:
    """Make a cell, labelled with its kind of work, of each prompt and temperature."""
    return [
        Cell(
            label=work,
            workload=prompt,
            batch_size=1,
            temperature=temperature,
            max_tokens=SPEED_TOKENS,
        )
        for work, prompts in workloads.items()
        for prompt in prompts[:NUM_PROMPTS]
        for temperature in TEMPERATURES
    ]


def sides_of(head: str, schedule: str) -> list[Side]:
    """Make plain vLLM, trees that need no model, and trees with a head.

    Three engines share the memory.
    """
    both = {**FRESH, "schedule": schedule}
    sides = [plain_side(PLAIN, eager=True)]
    sides += [
        tree_side({**spec, **both}, eager=True)
        for spec in (SUFFIX, {**HEAD, "model": head})
    ]
    return [
        side.model_copy(
            update={
                "name": side.family,
                "engine": {**side.engine, "gpu_memory_utilization": 0.25},
                "environment": {"VLLM_CPU_KVCACHE_SPACE": "1"},
            }
        )
        for side in sides
    ]


def fast_dtype() -> str:
    """bfloat16, but float32 on a processor that has no arithmetic for it."""
    if torch.cuda.is_available() or slow_arithmetic(torch.bfloat16) is None:
        return "bfloat16"
    return "float32"


@contextmanager
def started(console: Console, jobs: Sequence[Job]) -> Iterator[Engines]:
    """Start engines at the same time and end them at last; logs of a failure stay."""
    folder = Path(tempfile.mkdtemp(prefix="treespec-demo-"))
    with ExitStack() as stack:
        engines: Engines = {}
        for job in jobs:
            events = side_events(job, folder / f"{job.side.name}.log")
            engines[job.side.name] = stack.enter_context(closing(events))
            next(events)
        what = f"starting {len(jobs)} engines, {jobs[0].dtype}"
        for running in track(engines.values(), what, console=console):
            turn(running)
        yield engines
    shutil.rmtree(folder)


def job_of(side: Side, target: str, dtype: str, cells: Sequence[Cell]) -> Job:
    """Make the job of one engine; a workload is one prompt, named by itself."""
    return Job(
        side=side,
        target=target,
        prompts=[],
        workloads={cell.workload: [cell.workload] for cell in cells},
        cells=list(cells),
        max_tokens=STREAM_TOKENS,
        dtype=dtype,
        in_turns=True,
    )


def answer(events: Iterator[Event]) -> CellResult:
    """Let an engine answer the prompt of its next cell."""
    return next(results_of(turn(events)))


def show_answers(
    console: Console, sides: Sequence[Side], target: str, cells: Sequence[Cell]
) -> None:
    """Stream one answer side by side; compare others in float32, token for token."""
    greedy, with_drafts, without = (
        [
            cell.model_copy(update={"max_tokens": EXACT_TOKENS, "params": params})
            for cell in cells
            if bool(cell.temperature) == bool(params)
        ]
        for params in ({}, seeded(drafts=True), seeded(drafts=False))
    )
    plain, *trees = sides
    jobs = [job_of(plain, target, "float32", greedy)]
    asked = [*greedy, *with_drafts, *without]
    jobs += [job_of(side, target, "float32", asked) for side in trees]
    answers: dict[str, list[list[int]]] = {side.name: [] for side in sides}
    turns = [job.side.name for job in jobs for _ in job.cells]
    streamed = next((c for c in cells if c.label == "editing"), cells[0]).workload
    for job in jobs[:2]:
        job.stream = streamed
    with started(console, jobs) as engines:
        race(console, streamed, {side.name: engines[side.name] for side in sides[:2]})
        for name in track(turns, "comparing answers", console=console):
            answers[name] += answer(engines[name]).token_ids
    console.print(
        f"Equal answers, token for token (float32, {EXACT_TOKENS} tokens, a tree in "
        "every step):"
    )
    count = len(greedy)
    for name in [side.name for side in trees]:
        own = answers[name]
        equal = sum(map(eq, own, answers[PLAIN]))
        sampled = sum(map(eq, own[count:], own[2 * count :]))
        console.print(
            f"  {name}: {equal} of {count} greedy, beside plain vLLM; {sampled} of "
            f"{count} sampled with a seed, beside the same engine without drafts"
        )


def race(console: Console, prompt: str, engines: Engines) -> None:
    """Stream the answers of some engines side by side, in turns of equal length."""
    console.print(prompt.splitlines()[0], style="bold", markup=False)
    pieces: dict[str, list[Event]] = {name: [] for name in engines}
    with Live(console=console, auto_refresh=False, transient=True) as live:
        while running := [
            n for n, own in pieces.items() if not own or not own[-1]["ended"]
        ]:
            for name in running:
                pieces[name].append(turn(engines[name])[0])
            live.update(side_by_side(pieces, console), refresh=True)
    console.print(side_by_side(pieces))


def side_by_side(
    pieces: Mapping[str, Sequence[Event]], screen: Console | None = None
) -> Table:
    """Put answers into columns, each below its speed in the time of its own engine.

    With a screen of their own: the last lines, as many as it has room for.
    """
    table = Table(expand=True)
    texts = [Text("".join(p["text"] for p in own)) for own in pieces.values()]
    for name, own in pieces.items():
        seconds = sum(piece["seconds"] for piece in own)
        speed = sum(piece["num_tokens"] for piece in own) / seconds
        table.add_column(f"{name}: {speed:.0f} tokens/s, {seconds:.1f} s", ratio=1)
    if screen is not None:
        width = screen.width // len(texts) - BORDER_COLUMNS
        lines = screen.height - BORDER_LINES
        texts = [Text("\n").join(t.wrap(screen, width)[-lines:]) for t in texts]
    table.add_row(*texts)
    return table


def show_speeds(
    console: Console, sides: Sequence[Side], target: str, cells: Sequence[Cell]
) -> list[Pair]:
    """Answer all prompts with all sides in turn, and print the table."""
    turns = [cell for _ in range(ROUNDS) for cell in cells]
    jobs = [job_of(side, target, fast_dtype(), turns) for side in sides]
    pairs = []
    with started(console, jobs) as engines:
        order = deque(engines)
        for cell in track(turns, "answering in turn", console=console):
            results = {name: answer(engines[name]) for name in order}
            pairs.append(Pair.of(cell, results))
            order.rotate()
    console.print(speed_table(pairs, list(engines), TEMPERATURES))
    console.print(MEASURED_WITHOUT)
    return pairs
