"""The toy figure: acceptance rates for Bernoulli laws and two draft tokens."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import torch
from matplotlib.axes import Axes
from pydantic import BaseModel

from benchmarks.paper.acceptance_rate import acceptance_rate

matplotlib.use("Agg")
from matplotlib import pyplot as plt

# in the order of the figure of arXiv 2402.14160
RULES = {
    "multi_round": "multi-round",
    "k_seq": "K-SEQ",
    "optimal_transport": "OTM",
    "recursive_rejection": "recursive rejection",
}
NUM_DRAWS = 2
GRID = 41
CURVES = (0.1, 0.3, 0.5)
SHOWN = (0.1, 0.5, 0.9)


class Toy(BaseModel):
    """Acceptance rates on a grid."""

    # probabilities of token 1, strictly between 0 and 1
    grid: list[float]
    # by rule: [draft probability][target probability]
    rates: dict[str, list[list[float]]]


def compute(grid: int = GRID) -> Toy:
    """Compute every rule's acceptance rate on a square grid, exactly.

    Args:
        grid: points a side, at the middle of equal cells.

    """
    points = [(i + 0.5) / grid for i in range(grid)]
    rates = {
        rule: [[rate(rule, p, q) for q in points] for p in points] for rule in RULES
    }
    return Toy(grid=points, rates=rates)


def rate(rule: str, draft: float, target: float) -> float:
    """Probability that one of two draft tokens is accepted."""
    return acceptance_rate(rule, bernoulli(draft), bernoulli(target), NUM_DRAWS)


def bernoulli(probability: float) -> torch.Tensor:
    """Law of one token of two: float64 [2]."""
    return torch.tensor([1 - probability, probability], dtype=torch.float64)


def write(toy: Toy, folder: Path) -> None:
    """Write toy.json, toy.md and toy.png."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "toy.json").write_text(json.dumps(toy.model_dump()) + "\n")
    (folder / "toy.md").write_text(markdown(toy))
    draw(toy, folder / "toy.png")


def markdown(toy: Toy) -> str:
    """Write the mean and lowest rates, and the rates at some points."""
    headings = ["draft p", "target q", *RULES.values()]
    rows = [["mean of the grid", "", *over_grid(toy, np.mean)]]
    rows.append(["lowest of the grid", "", *over_grid(toy, np.min)])
    for p in SHOWN:
        for q in SHOWN:
            rates = [f"{rate(rule, p, q):.4f}" for rule in RULES]
            rows.append([f"{p:g}", f"{q:g}", *rates])
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join(
        [
            "Probability that one of K = 2 draft tokens from Ber(p) is accepted for "
            "the target Ber(q), computed exactly. Multi-round, K-SEQ and OTM draw with "
            "replacement, recursive rejection without.",
            "",
            "| " + " | ".join(headings) + " |",
            "|" + "---:|" * len(headings),
            *lines,
            "",
        ]
    )


def over_grid(toy: Toy, function: Any) -> list[str]:
    """Apply a function to each rule's grid."""
    return [f"{function(toy.rates[rule]):.4f}" for rule in RULES]


def draw(toy: Toy, path: Path) -> None:
    """Draw a map per rule over (q, p) and, below, curves over q at some p."""
    figure, axes = plt.subplots(
        2, len(RULES), figsize=(3.4 * len(RULES), 6.4), layout="constrained"
    )
    for axis, (rule, title) in zip(axes[0], RULES.items(), strict=True):
        image = axis.imshow(
            toy.rates[rule], origin="lower", extent=(0, 1, 0, 1), vmin=0, vmax=1
        )
        axis.set(title=title, xlabel="target q", ylabel="draft p")
    figure.colorbar(image, ax=axes[0], label="acceptance rate")
    for axis, p in zip(axes[1], CURVES, strict=False):
        draw_curves(axis, p)
    handles, labels = axes[1, 0].get_legend_handles_labels()
    axes[1, -1].axis("off")
    axes[1, -1].legend(handles, labels, loc="center")
    figure.savefig(path, dpi=130)
    plt.close(figure)


def draw_curves(axis: Axes, draft: float) -> None:
    """Draw all rules over the target's probability."""
    points: Sequence[float] = np.linspace(0, 1, GRID).tolist()
    for (rule, title), line in zip(RULES.items(), (":", "--", "-.", "-"), strict=True):
        axis.plot(points, [rate(rule, draft, q) for q in points], line, label=title)
    axis.set(title=f"draft p = {draft:g}", xlabel="target q", ylim=(0, 1.05))
    axis.set_ylabel("acceptance rate")
    axis.grid(alpha=0.3)
