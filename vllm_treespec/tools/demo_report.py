"""What the demo says about its speeds: the table, a busy machine, what to use."""

from __future__ import annotations

import json
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
SMALL_TARGET = (
    "A draft costs a third of a step of a target this small, so chat, which is hard to "
    "draft, gains nothing. A 1.5B target with hybrid gains 1.6x on chat, 2.3x on code "
    "and 4x on editing (README)."
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

    Args:
        pairs: rounds of the same cells.
        rounds: how many.

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


def gains(pairs: Sequence[Pair], name: str, work: str) -> dict[float, float]:
    """Median speed-up of a side by temperature."""
    temperatures = dict.fromkeys(pair.cell.temperature for pair in pairs)
    return {t: median(ratios(pairs, name, work, t)) for t in temperatures}


def advice(
    pairs: Sequence[Pair], sides: Sequence[Side], target: str, shipped: bool
) -> list[str]:
    """Say what to use for each kind of work, and what to type."""
    lines = []
    mean: dict[tuple[str, str], float] = {}
    for work in kinds(pairs):
        found = {side.name: gains(pairs, side.name, work) for side in sides[1:]}
        mean |= {(name, work): fmean(own.values()) for name, own in found.items()}
        best = max(found, key=lambda name: mean[name, work])
        figures = ", ".join(f"{x:.2f}x at T = {t:g}" for t, x in found[best].items())
        if mean[best, work] >= MIN_SPEEDUP:
            lines.append(f"{work}: use {best}, {figures}")
            continue
        lines.append(f"{work}: use plain vLLM; {best}, the best, {figures}")
        if shipped and work == "chat":
            lines.append(SMALL_TARGET)
    overall = max(
        sides[1:],
        key=lambda side: fmean(mean[side.name, work] for work in kinds(pairs)),
    )
    return [*lines, serve_command(overall, target)]


def serve_command(side: Side, target: str) -> str:
    """Make the command that serves a side's method, to be pasted into any shell."""
    given = side.engine["speculative_config"].items()
    spec = {k: v for k, v in given if k in ("method", "model", "drafter")}
    vllm = Path(sys.executable).with_name("vllm")
    words = [str(vllm), "serve", target, "--speculative-config", json.dumps(spec)]
    openmp = intel_openmp()
    preload = "" if openmp is None else f"LD_PRELOAD={shlex.quote(str(openmp))} "
    return preload + shlex.join(words)
