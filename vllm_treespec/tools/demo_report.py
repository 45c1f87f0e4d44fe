"""What the demo says about its speeds: the table, a busy machine, what to use."""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import NamedTuple

from rich.table import Column, Table

from vllm_treespec.tools.openmp import intel_openmp
from vllm_treespec.tools.rows import MIN_SPEEDUP
from vllm_treespec.tools.sides import PLAIN, Cell, CellResult, Side

# Highest over lowest speed of plain vLLM for one prompt when nothing else runs.
QUIET = 1.25
# Share of an answer's time in which the thread that makes it has a processor then.
ON_CPU = 0.85
# Step and draft: medians over chat cells in pairs, two busy Xeon cores.
SMALL_TARGET = (
    "Chat is hard to draft, and on a target this small a step with a tree takes as "
    "long as 1.3 plain steps, a tenth of one for drafting. A 1.5B target with hybrid "
    "gains 1.6x on chat, 2.3x on code and 4x on editing (README)."
)


class Pair(NamedTuple):
    """Speeds of all sides, which answered one prompt right after each other."""

    cell: Cell
    # side -> tokens per second
    speeds: Mapping[str, float]
    # CPU time over time, of all answers together
    on_cpu: float

    @classmethod
    def of(cls, cell: Cell, results: Mapping[str, CellResult]) -> Pair:
        """Compute it from the results of the sides."""
        return cls(
            cell,
            {name: sum(r.num_tokens) / r.seconds for name, r in results.items()},
            sum(r.cpu_seconds for r in results.values())
            / sum(r.seconds for r in results.values()),
        )


def busy(pairs: Sequence[Pair], rounds: int) -> str | None:
    """Say by which signs other programs kept the machine busy; None without any.

    ``pairs`` are rounds of the same cells.
    """
    plain = [pair.speeds[PLAIN] for pair in pairs]
    count = len(pairs) // rounds
    spread = max(max(own) / min(own) for i in range(count) if (own := plain[i::count]))
    on_cpu = median(pair.on_cpu for pair in pairs)
    signs = []
    if spread > QUIET:
        signs.append(f"plain vLLM's speed for one prompt differs {spread:.1f}x")
    if on_cpu < ON_CPU:
        signs.append(f"the engines had a processor for only {on_cpu:.0%} of their time")
    if not signs:
        return None
    return (
        f"The machine was busy: {', and '.join(signs)}. The figures mean little; run "
        "this again when it is quiet."
    )


def ratios(pairs: Sequence[Pair], name: str, work: str, t: float) -> list[float]:
    """Speed-ups of a side over plain vLLM, from low to high; plain's tokens/s."""
    return sorted(
        pair.speeds[name] / (1.0 if name == PLAIN else pair.speeds[PLAIN])
        for pair in pairs
        if (pair.cell.label, pair.cell.temperature) == (work, t)
    )


def speed_table(
    pairs: Sequence[Pair], names: Sequence[str], temperatures: Sequence[float]
) -> Table:
    """Make the table: a line for each kind of work and side."""
    columns = [
        Column(f"T = {t:g}", justify="right", no_wrap=True) for t in temperatures
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
            found = [ratios(pairs, name, work, t) for t in temperatures]
            texts = [form.format(median(r), r[0], r[-1]) for r in found]
            table.add_row(work, name, *texts)
        table.add_section()
    return table


def kinds(pairs: Sequence[Pair]) -> list[str]:
    """Kinds of work, in the order of the prompts."""
    return list(dict.fromkeys(pair.cell.label for pair in pairs))


def gains(pairs: Sequence[Pair], work: str) -> dict[str, dict[float, float]]:
    """Median speed-ups by method and temperature, methods with most gain first."""
    temperatures = dict.fromkeys(pair.cell.temperature for pair in pairs)
    found = {
        name: {t: median(ratios(pairs, name, work, t)) for t in temperatures}
        for name in pairs[0].speeds
        if name != PLAIN
    }
    best_first = sorted(found, key=lambda name: -fmean(found[name].values()))
    return {name: found[name] for name in best_first}


def advice(pairs: Sequence[Pair], shipped: bool) -> list[str]:
    """Say what to use for each kind of work; of the shipped target also why."""
    lines = []
    for work in kinds(pairs):
        name, best = next(iter(gains(pairs, work).items()))
        figures = ", ".join(f"{x:.2f}x at T = {t:g}" for t, x in best.items())
        if fmean(best.values()) >= MIN_SPEEDUP:
            lines.append(f"{work}: use {name}, {figures}")
            continue
        lines.append(f"{work}: use plain vLLM; {name}, the best, {figures}")
        if shipped and work == "chat":
            lines.append(SMALL_TARGET)
    return lines


def best_overall(pairs: Sequence[Pair]) -> str:
    """Name the method with the highest mean speed-up over all kinds of work."""
    by_work = [gains(pairs, work) for work in kinds(pairs)]
    return max(
        by_work[0], key=lambda name: fmean(fmean(own[name].values()) for own in by_work)
    )


def serve_command(side: Side, target: str) -> str:
    """Make the command that serves a side's method, to be pasted into any shell.

    It has the measurement's setting of glibc, such as large pages (docs/deploy.md).
    The share of the memory is that of the measurement: on a CPU vLLM's own default
    refuses to start where other programs hold some gigabytes.
    """
    given = side.engine["speculative_config"].items()
    spec = {k: v for k, v in given if k in ("method", "model", "drafter")}
    vllm = Path(sys.executable).with_name("vllm")
    words = [str(vllm), "serve", target]
    words += ["--gpu-memory-utilization", str(side.engine["gpu_memory_utilization"])]
    words += ["--speculative-config", json.dumps(spec)]
    openmp, tunables = intel_openmp(), os.environ.get("GLIBC_TUNABLES")
    settings = {"LD_PRELOAD": openmp, "GLIBC_TUNABLES": tunables}
    given_first = "".join(
        f"{name}={shlex.quote(str(value))} "
        for name, value in settings.items()
        if value
    )
    return given_first + shlex.join(words)
