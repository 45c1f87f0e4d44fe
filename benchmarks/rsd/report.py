"""Tables and plots of the experiments, from results.json alone."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness import plot, report
from benchmarks.harness.report import Content, number
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
TREE_COLUMNS: report.Columns[Row] = {
    "tree": lambda row: row["name"],
    "temperature": lambda row: f"{row['temperature']:g}",
    "L": lambda row: str(row["depth"]),
    "drafts": lambda row: str(row["num_drafts"]),
    "tokens": lambda row: str(row["num_tokens"]),
    "block efficiency": lambda row: (
        "{block_efficiency:.3f} ± {block_efficiency_error:.3f}".format(**row)
    ),
    "MBSU": lambda row: f"{row['mbsu']:.3f}",
    "tokens/s": lambda row: f"{row['token_rate']:.1f}",
    "tokens/s ÷ plain": lambda row: number(row["token_rate_ratio"], "{:.3f}"),
    "rounds": lambda row: str(row["rounds"]),
}
INTERVAL = "{mean:.3f} ({low:.3f} to {high:.3f})"
LAW_COLUMNS: report.Columns[Row] = {
    "first, second": lambda test: (
        ("control: " if test["control"] else "") + "{first}; {second}".format(**test)
    ),
    "answers": lambda test: "{} {}".format(*test["num_answers"]),
    "mean of the first": lambda test: INTERVAL.format(**test["first_mean"]),
    "of the second": lambda test: INTERVAL.format(**test["second_mean"]),
    "difference": lambda test: INTERVAL.format(**test["difference"]["interval"]),
    "p": lambda test: f"{test['difference']['p_value']:.4f}",
    "p of the tokens": lambda test: number(test["token_p_value"], "{:.4f}"),
}
TEXT_COLUMNS: report.Columns[Row] = {
    "answers of": lambda row: "{method}, temperature {temperature:g}".format(**row),
    "answers": lambda row: str(row["num_answers"]),
    "BLEU": lambda row: f"{row['bleu']:.2f}",
    "ROUGE-2": lambda row: f"{row['rouge_2']:.2f}",
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
    parts += ["## All trees", report.table_of(rows, TREE_COLUMNS)]
    parts.append("## Is the output law the target's?")
    parts.append(report.table_of(content["law"], LAW_COLUMNS))
    smallest = smallest_p_value(content["law"])
    if smallest is not None:
        parts.append(
            "Smallest p-value times the number of tests, the control's left out: "
            f"{smallest:.3f}."
        )
    if content["texts"]:
        parts += ["## References", report.table_of(content["texts"], TEXT_COLUMNS)]
    report.write_markdown(out, "The RSD paper's experiments", parts, content)


def best_tables(best: Sequence[Row]) -> list[str]:
    """One table per temperature and metric: methods by sizes."""
    sizes = sorted({point["size"] for point in best})
    tables = []
    for temperature in sorted({point["temperature"] for point in best}):
        for metric, title in TITLES.items():
            values = {
                (p["method"], p["size"]): (
                    f"{p['value']:.3f} ({p['tree'].removeprefix(p['method'] + '-')})"
                )
                for p in best
                if (p["temperature"], p["metric"]) == (temperature, metric)
            }
            lines = [[m, *(values.get((m, s), "–") for s in sizes)] for m in METHODS]
            heading = f"{title}, temperature {temperature:g}"
            tables.append(report.table([heading, *map(str, sizes)], lines))
    return tables


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
