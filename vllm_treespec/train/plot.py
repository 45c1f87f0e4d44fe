"""The picture of a training run."""

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt


def plot_history(history: list[dict[str, Any]], path: Path) -> None:
    """Draw losses against steps, and how often guesses are right.

    A head's guesses are drawn by level (arXiv 2403.09919, figure 3).

    Args:
        history: the Trainer's ``state.log_history``.
        path: PNG to write.
    """
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    evaluations = [log for log in history if "eval_kl" in log]
    levels = [k for k in evaluations[-1] if k.startswith("eval_accuracy_")]
    curves = {
        "loss": (left, "training KL"),
        "eval_kl": (left, "evaluation KL"),
        **{key: (right, f"t+{level}") for level, key in enumerate(levels, 1)},
    }
    if not levels:
        curves["eval_acceptance"] = right, "expected acceptance"
        curves["eval_top1"] = right, "top-1 agreement"
    for key, (axes, label) in curves.items():
        points = [(log["step"], log[key]) for log in history if key in log]
        marker = "o" if key.startswith("eval") else None
        axes.plot(*zip(*points, strict=True), marker=marker, label=label)
    left.set_ylabel("KL(target || drafter), nats")
    # The first steps are far above everything that follows.
    left.set_ylim(0, 1.5 * max(log["eval_kl"] for log in evaluations))
    right.set_ylabel("share of positions")
    right.set_ylim(0, 1)
    for axes in (left, right):
        axes.set_xlabel("step")
        axes.grid(alpha=0.3)
        axes.legend()
    figure.savefig(path, dpi=120)
    plt.close(figure)
