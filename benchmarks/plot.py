"""One picture: acceptance length and tokens per second over the target budget."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes

matplotlib.use("Agg")
from matplotlib import pyplot as plt

from vllm_treespec.tools.rows import Row
from vllm_treespec.tools.sides import PLAIN

COLOURS = {"sd": "tab:gray", "rsd_c": "tab:blue", "rsd_s": "tab:red"}
STOCK_MARKS = {"ngram": "^", "draft_model": "s"}
LINES = ("-", "--", ":", "-.")


def draw(rows: Sequence[Row], path: Path) -> None:
    """Save the plot: one panel of acceptance lengths, one of speeds per batch size."""
    batch_sizes = sorted({row.cell.batch_size for row in rows})
    count = 1 + len(batch_sizes)
    figure, axes = plt.subplots(
        1, count, figsize=(5 * count, 4.2), layout="constrained", squeeze=False
    )
    first = [row for row in rows if row.cell.batch_size == batch_sizes[0]]
    acceptance_panel(axes[0, 0], first)
    axes[0, 0].set_title(f"acceptance length, batch {batch_sizes[0]}")
    for axis, batch_size in zip(axes[0, 1:], batch_sizes, strict=True):
        here = [row for row in rows if row.cell.batch_size == batch_size]
        speed_panel(axis, here)
        axis.set_title(f"tokens/s, batch {batch_size}")
    for axis in axes[0]:
        axis.set_xlabel("draft tokens per tree")
        axis.grid(alpha=0.3)
        if axis.get_legend_handles_labels()[0]:
            axis.legend(fontsize=7)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def draw_methods(
    axis: Axes, rows: Sequence[Row], column: str, line: str, temperature: float
) -> None:
    """Draw one line per method of ours: its best tree of each budget."""
    for family, colour in COLOURS.items():
        points = best_points(rows, family, column)
        label = f"{family}, temperature {temperature:g}"
        if points[0]:
            axis.plot(*points, line, marker="o", color=colour, label=label)


def acceptance_panel(axis: Axes, rows: Sequence[Row]) -> None:
    """Draw the best tree of each method and budget."""
    for line, temperature in zip(LINES, temperatures(rows), strict=False):
        here = [row for row in rows if row.cell.temperature == temperature]
        draw_methods(axis, here, "acceptance_length", line, temperature)


def speed_panel(axis: Axes, rows: Sequence[Row]) -> None:
    """Draw the best tree of each method and budget, and stock vLLM."""
    for line, temperature in zip(LINES, temperatures(rows), strict=False):
        here = [row for row in rows if row.cell.temperature == temperature]
        draw_methods(axis, here, "tokens_per_s", line, temperature)
        for family, mark in STOCK_MARKS.items():
            points = best_points(here, family, "tokens_per_s")
            if points[0]:
                axis.plot(*points, mark, color="black", label=f"stock {family}")
        plain = [row.tokens_per_s for row in here if row.family == PLAIN]
        if plain:
            label = f"fastest plain, temperature {temperature:g}"
            axis.axhline(max(plain), linestyle=line, color="black", label=label)
    axis.set_ylim(bottom=0)


def temperatures(rows: Sequence[Row]) -> list[float]:
    """Temperatures that occur, ascending."""
    return sorted({row.cell.temperature for row in rows})


def best_points(
    rows: Sequence[Row], family: str, value: str
) -> tuple[list[int], list[float]]:
    """Budgets, and the highest value of any tree of that budget."""
    best: dict[int, float] = {}
    for row in rows:
        found = getattr(row, value)
        if row.family == family and found is not None:
            best[row.budget] = max(found, best.get(row.budget, found))
    budgets = sorted(best)
    return budgets, [best[budget] for budget in budgets]


def draw_workloads(rows: Sequence[Row], path: Path) -> None:
    """Save grouped bars: speed-up per workload at the smallest batch size, one panel
    per temperature, without the plain sides."""
    smallest = min(row.cell.batch_size for row in rows)
    rows = [row for row in rows if row.cell.batch_size == smallest]
    workloads = list(dict.fromkeys(row.cell.workload for row in rows))
    sides = list(dict.fromkeys(row.side for row in rows if row.family != PLAIN))
    speedups = {
        (row.side, row.cell.workload, row.cell.temperature): row.speedup or 0.0
        for row in rows
    }
    panels = temperatures(rows)
    figure, axes = plt.subplots(
        len(panels),
        1,
        figsize=(1.8 * len(workloads) + 3, 3 * len(panels)),
        layout="constrained",
        squeeze=False,
    )
    width = 0.8 / max(len(sides), 1)
    for axis, temperature in zip(axes[:, 0], panels, strict=True):
        for number, side in enumerate(sides):
            places = [w + (number + 0.5) * width - 0.4 for w in range(len(workloads))]
            heights = [speedups.get((side, w, temperature), 0.0) for w in workloads]
            axis.bar(places, heights, width, label=side)
        axis.axhline(1, color="black", linewidth=0.8)
        axis.set_xticks(range(len(workloads)), workloads)
        axis.set_ylabel("speed-up over plain")
        axis.set_title(f"batch {smallest}, temperature {temperature:g}")
        axis.grid(axis="y", alpha=0.3)
    if sides:
        axes[0, 0].legend(fontsize=7)
    figure.savefig(path, dpi=130)
    plt.close(figure)
