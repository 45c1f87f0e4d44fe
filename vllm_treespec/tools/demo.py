"""The demo: three kinds of work on a real model, plain and with draft trees.

The engines of all sides are in memory at once and take turns: a machine whose speed
changes is then as fast for one side as for the others.
"""

from __future__ import annotations

import json
import shlex
import shutil
import tempfile
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from itertools import takewhile
from operator import eq
from pathlib import Path
from statistics import fmean, median
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.live import Live
from rich.progress import track
from rich.table import Column, Table
from rich.text import Text

from vllm_treespec.config import SpecConfigError
from vllm_treespec.schedule.processor import slow_arithmetic
from vllm_treespec.tools.assets import (
    REDRAFTER,
    AssetError,
    ensure_target,
    shipped_drafter,
)
from vllm_treespec.tools.launch import READY, EngineError, Event
from vllm_treespec.tools.prompts import SHIPPED_WORKLOADS, PromptError, load_workloads
from vllm_treespec.tools.rows import MIN_SPEEDUP
from vllm_treespec.tools.sides import (
    PLAIN,
    Cell,
    CellResult,
    Job,
    Side,
    check_model,
    plain_side,
    seeded,
    side_events,
    tree_side,
)

SUFFIX: dict[str, Any] = {"method": "suffix_tree"}
HEAD: dict[str, Any] = {"method": "hybrid", "drafter": "redrafter"}
# Prompts repeat, and an answer is not to be drafted from an earlier one.
MEASURED: dict[str, Any] = {"max_cached_tokens": 0}
TEMPERATURES = (0.0, 1.0)
# Prompts of each kind of work; how often each is answered at each temperature.
NUM_PROMPTS, ROUNDS = 3, 2
STREAM_TOKENS, SPEED_TOKENS, EXACT_TOKENS = 160, 40, 16
# Highest over lowest speed of plain vLLM for one prompt when nothing else runs.
QUIET = 1.25
SMALL_TARGET = (
    "A draft costs a third of a step of a target this small, so chat, which is hard to "
    "draft, gains nothing. A 1.5B target with hybrid gains 1.6x on chat, 2.3x on code "
    "and 4x on editing (README)."
)

# Events of the engines, by the names of their sides.
Engines = dict[str, Iterator[Event]]


class Pair(NamedTuple):
    """Speeds of all sides, which answered one prompt right after each other."""

    cell: Cell
    # side -> tokens per second
    speeds: Mapping[str, float]


def main(
    target: str | None = None,
    head: str | None = None,
    prompts: Path | None = None,
) -> None:
    """Show and measure what draft trees gain, and that answers stay the same.

    Args:
        target: folder of the target model; None gets SmolLM2-135M-Instruct.
        head: folder of a ReDrafter head for it; None takes the shipped one.
        prompts: JSONL with ``workload`` and ``prompt``; None takes the shipped one.

    Exits with status 1 and one line when a model is missing or an engine fails.

    """
    console = Console(highlight=False)
    try:
        # The head first: getting the target takes a download.
        sides = sides_of(head or shipped_drafter(REDRAFTER))
        cells = cells_of(load_workloads(prompts or SHIPPED_WORKLOADS))
        model = target or str(ensure_target())
        check_model("--target", model)
        console.print(
            f"{Path(model).name} on stock vLLM, one request at a time. Engines run "
            "eager here to start fast; published figures are of compiled ones."
        )
        show_answers(console, sides, model, cells)
        pairs = show_speeds(console, sides, model, cells)
    except (AssetError, EngineError, PromptError, SpecConfigError) as error:
        raise SystemExit(f"treespec demo: {error}") from None
    for line in advice(pairs, sides, model, shipped=target is None):
        console.print(line, markup=False, soft_wrap=True)


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


def sides_of(head: str) -> list[Side]:
    """Make plain vLLM, trees that need no model, and trees with a head.

    Three engines share the memory.
    """
    trees = [{**SUFFIX, **MEASURED}, {**HEAD, **MEASURED, "model": head}]
    sides = [plain_side(PLAIN, eager=True)]
    sides += [tree_side(spec, eager=True) for spec in trees]
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


def turn(events: Iterator[Event]) -> list[Event]:
    """Let an engine work until it waits for its next turn."""
    return list(takewhile(lambda event: event["event"] != READY, events))


def answer(events: Iterator[Event]) -> CellResult:
    """Let an engine answer the prompt of its next cell."""
    return CellResult.model_validate(turn(events)[0]["result"])


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
    console.print(f"Equal answers, token for token (float32, {EXACT_TOKENS} tokens):")
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
            live.update(side_by_side(pieces), refresh=True)
    console.print(side_by_side(pieces))


def side_by_side(pieces: Mapping[str, Sequence[Event]]) -> Table:
    """Put answers into columns, each below its speed in the time of its own engine."""
    table = Table(expand=True)
    for name, own in pieces.items():
        seconds = sum(piece["seconds"] for piece in own)
        speed = sum(piece["num_tokens"] for piece in own) / seconds
        table.add_column(f"{name}: {speed:.0f} tokens/s, {seconds:.1f} s", ratio=1)
    texts = ("".join(piece["text"] for piece in own) for own in pieces.values())
    table.add_row(*map(Text, texts))
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
            speeds = {n: sum(r.num_tokens) / r.seconds for n, r in results.items()}
            pairs.append(Pair(cell, speeds))
            order.rotate()
    console.print(speed_table(pairs, list(engines)))
    plain = [pair.speeds[PLAIN] for pair in pairs]
    same = [plain[i :: len(cells)] for i in range(len(cells))]
    if (spread := max(max(own) / min(own) for own in same)) > QUIET:
        console.print(
            f"The machine was busy: plain vLLM's speed for one prompt differs "
            f"{spread:.1f}x. The figures mean little; run this again when it is quiet.",
            style="bold red",
        )
    return pairs


def ratios(pairs: Sequence[Pair], name: str, work: str, t: float) -> list[float]:
    """Speed-ups of a side over plain vLLM, from low to high; plain's tokens/s."""
    return sorted(
        pair.speeds[name] / (1.0 if name == PLAIN else pair.speeds[PLAIN])
        for pair in pairs
        if (pair.cell.label, pair.cell.temperature) == (work, t)
    )


def speed_table(pairs: Sequence[Pair], names: Sequence[str]) -> Table:
    """Make the table: a line for each kind of work and side."""
    columns = [
        Column(f"T = {t:g}", justify="right", no_wrap=True) for t in TEMPERATURES
    ]
    title = "speed-up over plain vLLM in pairs: median (lowest-highest)"
    table = Table("work", "method", *columns, title=title)
    for work in kinds(pairs):
        for name in names:
            form = (
                "{:.0f} ({:.0f}-{:.0f}) tok/s"
                if name == PLAIN
                else "{:.2f} ({:.2f}-{:.2f})"
            )
            found = [ratios(pairs, name, work, t) for t in TEMPERATURES]
            texts = [form.format(median(r), r[0], r[-1]) for r in found]
            table.add_row(work, name, *texts)
        table.add_section()
    return table


def kinds(pairs: Sequence[Pair]) -> list[str]:
    """Kinds of work, in the order of the prompts."""
    return list(dict.fromkeys(pair.cell.label for pair in pairs))


def advice(
    pairs: Sequence[Pair], sides: Sequence[Side], target: str, shipped: bool
) -> list[str]:
    """Say what to use for each kind of work, and what to type."""

    def gain(side: Side, works: Sequence[str]) -> float:
        return fmean(
            median(ratios(pairs, side.name, w, t)) for w in works for t in TEMPERATURES
        )

    lines = []
    works = kinds(pairs)
    for work in works:
        best = max(sides[1:], key=lambda side: gain(side, [work]))
        speedup = gain(best, [work])
        if speedup >= MIN_SPEEDUP:
            lines.append(f"{work}: use {best.name}, {speedup:.1f}x")
            continue
        lines.append(f"{work}: use plain vLLM; {best.name}, the best, {speedup:.1f}x")
        if shipped and work == "chat":
            lines.append(SMALL_TARGET)
    best = max(sides[1:], key=lambda side: gain(side, works))
    given = best.engine["speculative_config"].items()
    spec = {k: v for k, v in given if k in ("method", "model", "drafter")}
    serve = ["vllm", "serve", target, "--speculative-config", json.dumps(spec)]
    return [*lines, shlex.join(serve)]
