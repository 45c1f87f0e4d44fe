"""Plots of both experiments: metrics of each method's best trees over the size."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes

from benchmarks.paper.metrics import METRICS, Best
from benchmarks.paper.trees import METHODS

matplotlib.use("Agg")
from matplotlib import pyplot as plt

STYLES = {
    "sd": ("tab:gray", "s"),
    "spectr": ("tab:green", "^"),
    "rsd_c": ("tab:blue", "D"),
    "rsd_s": ("tab:red", "o"),
}
TITLES = {
    "block_efficiency": "block efficiency",
    "mbsu": "memory-bound speed-up",
    "token_rate_ratio": "token rate / plain",
}
X_LABELS = {"lengths": "draft length", "budgets": "target budget (draft tokens)"}


def draw(best: Sequence[Best], experiment: str, path: Path) -> None:
    """Draw one row of panels per temperature, one column per metric."""
    temperatures = sorted({point.temperature for point in best})
    figure, axes = plt.subplots(
        len(temperatures),
        len(METRICS),
        figsize=(4.2 * len(METRICS), 3.4 * len(temperatures)),
        layout="constrained",
        squeeze=False,
    )
    for line, temperature in zip(axes, temperatures, strict=True):
        for axis, metric in zip(line, METRICS, strict=True):
            here = [b for b in best if b.temperature == temperature]
            panel(axis, [b for b in here if b.metric == metric])
            axis.set_title(f"{TITLES[metric]}, temperature {temperature:g}")
            axis.set_xlabel(X_LABELS[experiment])
    axes[0, 0].legend(fontsize=8)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def panel(axis: Axes, points: Sequence[Best]) -> None:
    """Draw one line per method, and plain decoding at 1."""
    for method in METHODS:
        mine = sorted((p.size, p.value) for p in points if p.method == method)
        if mine:
            colour, mark = STYLES[method]
            axis.plot(*zip(*mine, strict=True), marker=mark, color=colour, label=method)
    axis.axhline(1, color="black", linestyle=":", label="plain")
    axis.set_xticks(sorted({point.size for point in points}))
    axis.grid(alpha=0.3)
