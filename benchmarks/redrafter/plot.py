"""The pictures: tables 1 and 2 at a glance, figures 5 and 6."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes

from benchmarks.redrafter.parts import TABLE2_SIDES, WITHOUT
from benchmarks.redrafter.report import Results
from benchmarks.redrafter.rows import Compression, Mean, Row, Stretch
from vllm_treespec.tools.sides import PLAIN

matplotlib.use("Agg")
from matplotlib import pyplot as plt

COLOURS = {
    PLAIN: "tab:gray",
    "medusa": "tab:orange",
    "medusa-typical": "navajowhite",
    "redrafter": "tab:blue",
    "redrafter-typical": "lightskyblue",
    "redrafter-stochastic": "tab:red",
}
MARKS = "soD^v"
BEAM_COLOURS = ("tab:blue", "tab:red", "tab:green", "tab:purple")


def draw(results: Results, folder: Path) -> None:
    """Save a picture of each part that has numbers."""
    if rows := results.of("table1"):
        draw_table1(rows, folder / "table1.png")
    if rows := results.of("table2"):
        draw_table2(rows, folder / "table2.png")
    if results.stretches:
        draw_figure5(results.stretches, results.compressions, folder / "figure5.png")
    if rows := results.of("figure6"):
        draw_figure6(rows, folder / "figure6.png")


def panels(count: int, path: Path, fill: Callable[[list[Axes]], None]) -> None:
    """Save a picture of panels side by side."""
    figure, axes = plt.subplots(
        1, count, figsize=(5 * count, 4.2), layout="constrained", squeeze=False
    )
    for axis in axes[0]:
        axis.grid(alpha=0.3)
    fill(list(axes[0]))
    figure.savefig(path, dpi=130)
    plt.close(figure)


def draw_table1(rows: Sequence[Row], path: Path) -> None:
    """Draw bars of speed, tokens per step and quality."""

    def fill(axes: list[Axes]) -> None:
        labels = [row.label for row in rows][::-1]
        colours = [COLOURS[row.side] for row in rows][::-1]
        columns = {
            "tokens/s, with speed-up over plain": [
                (row.tokens_per_s, 0.0, f"{row.speedup:.2f}×" if row.speedup else "")
                for row in rows
            ],
            "tokens per target step": [bar(row.tokens_per_step, 1.0) for row in rows],
            "mean log-likelihood per token (nats)": [bar(r.quality) for r in rows],
        }
        for axis, (title, bars) in zip(axes, columns.items(), strict=True):
            values, errors, notes = zip(*bars[::-1], strict=True)
            drawn = axis.barh(
                labels, values, xerr=errors, color=colours, edgecolor="black", lw=0.5
            )
            axis.bar_label(drawn, notes, padding=4, fontsize=8)
            axis.set_xlabel(title)
            axis.margins(x=0.2)
        for axis in axes[1:]:
            axis.tick_params(labelleft=False)

    panels(3, path, fill)


def bar(value: Mean | None, missing: float = 0.0) -> tuple[float, float, str]:
    """Length, error and note of a bar."""
    if value is None:
        return missing, 0.0, ""
    return value.mean, value.error, f"{value.mean:.2f}"


def draw_table2(rows: Sequence[Row], path: Path) -> None:
    """Draw speed-up, tokens per step and quality over the temperature."""

    def fill(axes: list[Axes]) -> None:
        for mark, (side, label) in zip(MARKS, TABLE2_SIDES.items(), strict=False):
            mine = [row for row in rows if row.side == side and row.temperature > 0]
            style = {"color": COLOURS[side], "marker": mark, "label": label}
            speedups = [(row.temperature, row.speedup) for row in mine]
            steps = [(row.temperature, row.tokens_per_step) for row in mine]
            gains = [(row.temperature, row.quality_gain) for row in mine]
            points(axes[0], speedups, style)
            means(axes[1], steps, style)
            means(axes[2], gains, style)
        titles = (
            "speed-up over plain vLLM at this temperature",
            "tokens per target step",
            "log-likelihood per token − plain greedy's (nats)",
        )
        for axis, title in zip(axes, titles, strict=True):
            axis.set_xlabel("temperature")
            axis.set_ylabel(title)
        axes[0].axhline(1, color="black", linestyle=":", lw=1)
        axes[2].axhline(0, color="black", linestyle=":", lw=1)
        if axes[0].get_legend_handles_labels()[0]:
            axes[0].legend(fontsize=8)

    panels(3, path, fill)


def points(
    axis: Axes, found: Sequence[tuple[float, float | None]], style: dict[str, Any]
) -> None:
    """Draw a line through the values that are there."""
    known = [(x, y) for x, y in found if y is not None]
    if known:
        axis.plot(*zip(*known, strict=True), **style)


def means(
    axis: Axes, found: Sequence[tuple[float, Mean | None]], style: dict[str, Any]
) -> None:
    """Draw a line through the means that are there, with their standard errors."""
    known = [(x, y.mean, y.error) for x, y in found if y is not None]
    if known:
        x, y, error = zip(*known, strict=True)
        axis.errorbar(x, y, yerr=error, capsize=3, **style)


def draw_figure5(
    stretches: Sequence[Stretch], compressions: Sequence[Compression], path: Path
) -> None:
    """Draw tokens per step over the answer's length, and the compression."""

    def fill(axes: list[Axes]) -> None:
        left, right = axes
        for mark, width in zip(
            MARKS, dict.fromkeys(s.beam_width for s in stretches), strict=False
        ):
            mine = [s for s in stretches if s.beam_width == width]
            middles = [((s.first + s.last) / 2, s.tokens_per_step) for s in mine]
            means(left, middles, {"marker": mark, "label": f"beam width {width}"})
        edges = {s.first - 1 for s in stretches} | {s.last for s in stretches}
        left.set_xticks(sorted(edges))
        left.set_xlabel("output tokens before the step")
        left.set_ylabel("tokens per target step")
        left.set_title("(a) tokens per step")
        left.margins(y=0.3)
        left.legend(fontsize=8, ncols=3, loc="upper center")
        compression_panel(right, compressions)

    panels(2, path, fill)


def compression_panel(axis: Axes, compressions: Sequence[Compression]) -> None:
    """Draw tokens to verify with tree attention over those without."""
    without = [c.num_candidates for c in compressions]
    with_it = [c.mean for c in compressions]
    low, high = [c.low for c in compressions], [c.high for c in compressions]
    axis.plot(without, without, "--", color="tab:gray", label="without tree attention")
    axis.plot(without, with_it, "o-", color="tab:blue", label="with: mean")
    axis.fill_between(
        without, low, high, color="tab:blue", alpha=0.2, label="1st–99th percentile"
    )
    for c in compressions:
        axis.annotate(
            f"÷ {c.num_candidates / c.mean:.2f}",
            (c.num_candidates, c.mean),
            (0, -14),
            textcoords="offset points",
            ha="center",
            fontsize=8,
        )
    beams = [f"{c.num_candidates}\n{c.beam_width}×{c.length}" for c in compressions]
    axis.set_xticks(without, labels=beams)
    axis.set_xlabel("draft tokens of all beams (beam width × length)")
    axis.set_ylabel("draft tokens to verify per step")
    axis.set_title("(b) compression by tree attention")
    axis.set_ylim(bottom=0)
    axis.legend(fontsize=8, loc="upper left")


def draw_figure6(rows: Sequence[Row], path: Path) -> None:
    """Draw speed per request and throughput over the batch size."""
    labels = list(dict.fromkeys(row.label for row in rows))
    families = dict.fromkeys(label.removesuffix(WITHOUT) for label in labels)
    colours = dict(zip(families, ("black", *BEAM_COLOURS), strict=False))

    def fill(axes: list[Axes]) -> None:
        for label in labels:
            mine = [row for row in rows if row.label == label]
            without = label.endswith(WITHOUT)
            style = {
                "color": colours[label.removesuffix(WITHOUT)],
                "linestyle": "--" if without else "-",
                "marker": "x" if without else "o",
                "label": label,
            }
            speeds = [(row.batch_size, row.tokens_per_s) for row in mine]
            points(axes[0], [(n, s / n) for n, s in speeds], style)
            points(axes[1], speeds, style)
        sizes = sorted({row.batch_size for row in rows})
        titles = ("tokens/s per request", "throughput: tokens/s of all requests")
        for axis, title in zip(axes, titles, strict=True):
            axis.set_xscale("log", base=2)
            axis.set_xticks(sizes, labels=map(str, sizes))
            axis.set_ylim(bottom=0)
            axis.set_xlabel("batch size (requests at a time)")
            axis.set_ylabel(title)
        axes[0].legend(fontsize=8)

    panels(2, path, fill)
