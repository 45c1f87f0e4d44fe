"""Tables and pictures, from results.json alone."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.harness import plot, report
from benchmarks.harness.head_rows import COLUMNS, HeadRow
from benchmarks.harness.report import Content, column, number
from benchmarks.lyanna.coverage import SHARES
from benchmarks.lyanna.parts import LYANNA_HOT, MERGE, REPLACE
from benchmarks.lyanna.rows import ACCURACY

Row = dict[str, Any]
NOTE = (
    "Speed-ups are over plain vLLM at the same batch size. The paper's 3.3× is over "
    "speculative decoding with a draft model; its figures have no plain decoding."
)
RATIOS: report.Columns[Row] = {
    "of": column("of", "{}"),
    "ratio": column("ratio", "{}"),
    "batch size or depth": column("at", "{}"),
    "median": column("median", "{:.3f}"),
    "min": column("min", "{:.3f}"),
    "max": column("max", "{:.3f}"),
}
FIGURE12: report.Columns[HeadRow] = {
    "batch": lambda row: str(row.cell.batch_size),
    **COLUMNS,
    "leftover nodes": lambda row: number(row.leftover_nodes, "{:.2f}"),
    "of them accepted": lambda row: number(row.leftover_accepted, "{:.3f}"),
}


def share_of(row: Row, index: int) -> str:
    """Write the share of one step with its error."""
    found = row["steps"][index:]
    return "{share:.1%} ± {error:.1%}".format(**found[0]) if found else "–"


TABLE1: report.Columns[Row] = {
    "head": lambda row: f"{row['label']} ({row['side'].removeprefix('table1-')})",
    **{f"step {index + 1}": partial(share_of, index=index) for index in range(3)},
    "tokens/step": column("length", "{:.2f}"),
    "trees": column("trees", "{}"),
}
OUTPUT: report.Columns[Row] = {
    "side": column("side", "{}"),
    "5 rows at once, ms": column("once_ms", "{:.3f}"),
    "one by one, ms": column("rows_ms", "{:.3f}"),
    "ratio": lambda row: f"{row['once_ms'] / row['rows_ms']:.3f}",
    "softmax at once, ms": column("softmax_once_ms", "{:.3f}"),
    "softmax one by one, ms": column("softmax_rows_ms", "{:.3f}"),
}
DRAFTING: report.Columns[Row] = {
    "side": column("side", "{}"),
    "depth": column("depth", "{}"),
    "drafting, ms": column("draft", "{:.2f}"),
    "head's forwards": column("draft_forward", "{:.2f}"),
    "committed tokens": column("pairs", "{:.2f}"),
    "levels": column("levels", "{:.2f}"),
}
COVERAGE: report.Columns[Row] = {
    "share of tokens": column("share", "{:.1%}"),
    "tokens": column("tokens", "{}"),
    "share of occurrences": column("occurrences", "{:.2%}"),
}


def render(content: Content, out: Path) -> None:
    """Write what is finished of each part, and pictures of it."""
    rows = [HeadRow.model_validate(row) for row in content["speed"]]
    labels = content["labels"]
    chains = [
        row
        for row in rows
        if row.kind in (LYANNA_HOT, MERGE, REPLACE) and row.cell.batch_size < 3
    ]
    chains.sort(key=lambda row: row.cell.batch_size)
    table1 = [{**row, "label": labels.get(row["side"])} for row in content["table1"]]
    parts: dict[str, tuple[Sequence[Any], report.Columns[Any]]] = {
        f"Figures 8 to 11: T = 0, batch {size}": (
            [row for row in rows if row.cell.batch_size == size],
            COLUMNS,
        )
        for size in dict.fromkeys(row.cell.batch_size for row in rows)
    }
    parts |= {
        "Ratios in the same round": (content["ratios"], RATIOS),
        "Figure 12: levels that are left": (chains, FIGURE12),
        "Table 1: acceptance of a step after the one before": (table1, TABLE1),
        "Table 2: accuracy, mean of three levels": table2(content["curves"]),
        "Figure 7: tokens of the text": (content["coverage"][: len(SHARES)], COVERAGE),
        "Figure 13a: output layer": (content["output"], OUTPUT),
        "Figure 13b: drafting, ms a step": (content["drafting"], DRAFTING),
    }
    texts = [
        f"## {title}\n\n{report.table_of(held, columns)}"
        for title, (held, columns) in parts.items()
        if held
    ]
    report.write_markdown(out, "Lyanna's evidence", [*texts, NOTE], content)
    draw(rows, content, out)


def table2(curves: Sequence[Row]) -> tuple[list[Row], report.Columns[Row]]:
    """Accuracies by step, a column for each head."""
    steps: dict[int, Row] = {}
    columns = {"step": column("step", "{}")}
    for point in curves:
        if point["metric"] == ACCURACY:
            at, head = point["step"], point["head"]
            steps.setdefault(at, {"step": at})[head] = point["value"]
            columns[head] = column(head, "{:.2%}")
    return [steps[at] for at in sorted(steps)], columns


def draw(rows: Sequence[HeadRow], content: Content, out: Path) -> None:
    """Draw speeds over batch sizes, drafting, training curves, and token coverage."""
    points = [
        {
            "batch size": row.cell.batch_size,
            "tokens/s": row.tokens_per_s,
            "speed-up over plain": row.speedup,
            "side": row.side,
        }
        for row in rows
    ]
    for y, name in {"tokens/s": "tokens", "speed-up over plain": "speed"}.items():
        over: dict[str, Any] = {"x": "batch size", "y": y, "hue": "side"}
        plot.line_panels(points, out / f"{name}.png", **over, log_x=True)
    curve: dict[str, Any] = {"x": "step", "y": "value", "hue": "head", "col": "metric"}
    plot.line_panels(content["curves"], out / "figure5.png", **curve)
    share: dict[str, Any] = {"x": "share", "y": "occurrences"}
    plot.line_panels(content["coverage"], out / "figure7.png", **share)
    bars: dict[str, Any] = {"x": "depth", "y": "draft", "hue": "side", "aspect": 1.5}
    plot.bar_panels(content["drafting"], out / "figure13b.png", **bars)
