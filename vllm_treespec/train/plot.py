"""The picture of a training run."""

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.figure import Figure


def plot_history(history: list[dict[str, Any]], path: Path) -> None:
    """Draw loss, and acceptance and top-1 agreement, against steps.

    Args:
        history: the Trainer's ``state.log_history``.
        path: PNG to write.
    """
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    for axes, key, label in (
        (left, "loss", "training KL"),
        (left, "eval_kl", "evaluation KL"),
        (right, "eval_acceptance", "expected acceptance"),
        (right, "eval_top1", "top-1 agreement"),
    ):
        points = [(log["step"], log[key]) for log in history if key in log]
        marker = "o" if key.startswith("eval") else None
        axes.plot(*zip(*points, strict=True), marker=marker, label=label)
    left.set_ylabel("KL(target || draft), nats")
    # The first steps are far above everything that follows.
    losses = [log["eval_kl"] for log in history if "eval_kl" in log]
    left.set_ylim(0, 1.5 * max(losses))
    right.set_ylabel("share of positions")
    right.set_ylim(0, 1)
    _save(figure, path)


def plot_head_history(history: list[dict[str, Any]], path: Path) -> None:
    """Draw a head's loss and its accuracy by level (arXiv 2403.09919, figure 3).

    Args:
        history: the Trainer's ``state.log_history``.
        path: PNG to write.
    """
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    for key, label in (("loss", "training KL"), ("eval_kl", "evaluation KL")):
        points = [(log["step"], log[key]) for log in history if key in log]
        marker = "o" if key.startswith("eval") else None
        left.plot(*zip(*points, strict=True), marker=marker, label=label)
    left.set_ylabel("KL(target || head), nats")
    evaluations = [log for log in history if "eval_kl" in log]
    left.set_ylim(0, 1.5 * max(log["eval_kl"] for log in evaluations))
    depth = sum(key.startswith("eval_accuracy_") for key in evaluations[-1])
    steps = [log["step"] for log in evaluations]
    for level in range(1, depth + 1):
        values = [log[f"eval_accuracy_{level}"] for log in evaluations]
        right.plot(steps, values, marker="o", label=f"t+{level}")
    right.set_ylabel("likeliest token is the target's")
    right.set_ylim(0, 1)
    _save(figure, path)


def _save(figure: Figure, path: Path) -> None:
    for axes in figure.axes:
        axes.set_xlabel("step")
        axes.grid(alpha=0.3)
        axes.legend()
    figure.savefig(path, dpi=120)
    plt.close(figure)
