"""Tables and plots of the experiments, from results.json alone."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness import plot, report
from benchmarks.harness.report import Columns, Content
from benchmarks.rsd.metrics import Row
from benchmarks.rsd.trees import METHODS

HEADINGS = {
    "lengths": "Experiment 1: draft length",
    "budgets": "Experiment 2: target budget",
}
X_LABELS = {"lengths": "draft length", "budgets": "target budget (draft tokens)"}
TITLES = {
    "block_efficiency": "block efficiency",
    "mbsu": "memory-bound speed-up",
    "token_rate_ratio": "token rate / plain",
}
TREE_COLUMNS: Columns = {
    "tree": "{name}",
    "temperature": "{temperature:g}",
    "L": "{depth}",
    "drafts": "{num_drafts}",
    "tokens": "{num_tokens}",
    "block efficiency": "{block_efficiency:.3f} ± {block_efficiency_error:.3f}",
    "MBSU": "{mbsu:.3f}",
    "tokens/s": "{token_rate:.1f}",
    "tokens/s ÷ plain": "{token_rate_ratio:.3f}",
    "rounds": "{rounds}",
}
INTERVAL = "{%(of)s[mean]:.3f} ({%(of)s[low]:.3f} to {%(of)s[high]:.3f})"
LAW_COLUMNS: Columns = {
    "first, second": lambda test: (
        ("control: " if test["control"] else "") + "{first}; {second}".format(**test)
    ),
    "answers": "{num_answers[0]} {num_answers[1]}",
    "mean of the first": INTERVAL % {"of": "first_mean"},
    "of the second": INTERVAL % {"of": "second_mean"},
    "difference": INTERVAL % {"of": "difference[interval]"},
    "p": "{difference[p_value]:.4f}",
    "p of the tokens": "{token_p_value:.4f}",
}


def render(content: Content, out: Path) -> None:
    """Write best and full tables, the check of the law, and a plot per experiment."""
    rows = sorted(content["rows"], key=lambda row: row["temperature"])
    parts = []
    for experiment, heading in HEADINGS.items():
        best = [p for p in content["best"] if p["experiment"] == experiment]
        if best:
            parts += [f"## {heading}", *best_tables(best)]
            draw(best, X_LABELS[experiment], out / f"{experiment}.png")
    parts += report.sections(
        {
            "All trees": (rows, TREE_COLUMNS),
            "Is the output law the target's?": (content["law"], LAW_COLUMNS),
        }
    )
    smallest = smallest_p_value(content["law"])
    if smallest is not None:
        parts.append(
            "Smallest p-value times the number of tests, the control's left out: "
            f"{smallest:.3f}."
        )
    report.write_markdown(out, "The RSD paper's experiments", parts, content)


def best_tables(best: Sequence[Row]) -> list[str]:
    """One table per temperature and metric: methods by sizes."""
    sizes = {size: str(size) for size in sorted({point["size"] for point in best})}
    return [
        report.grid(
            [f"{title}, temperature {temperature:g}"],
            sizes,
            {
                ((method,), p["size"]): (
                    f"{p['value']:.3f} ({p['tree'].removeprefix(method + '-')})"
                )
                for method in METHODS
                for p in best
                if (p["temperature"], p["metric"], p["method"])
                == (temperature, metric, method)
            },
        )
        for temperature in sorted({point["temperature"] for point in best})
        for metric, title in TITLES.items()
    ]


def smallest_p_value(law: Sequence[dict[str, Any]]) -> float | None:
    """Smallest p-value of all tests but the control's, times their number."""
    tests = [test for test in law if not test["control"]]
    values = [test["difference"]["p_value"] for test in tests]
    values += [t["token_p_value"] for t in tests if t["token_p_value"] is not None]
    return min(1.0, len(values) * min(values)) if values else None


def draw(best: Sequence[Row], size: str, path: Path) -> None:
    """Draw the best trees over the size: a row per temperature, a panel per metric."""
    points = [{**p, size: p["size"], "metric": TITLES[p["metric"]]} for p in best]
    panels: dict[str, Any] = {"hue": "method", "col": "metric", "row": "temperature"}
    plot.line_panels(points, path, x=size, y="value", level=1, **panels)
