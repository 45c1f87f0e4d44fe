"""Tables and pictures, from results.json alone."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness import plot, report
from benchmarks.harness.report import Columns, Content
from benchmarks.harness.rows import COLUMNS, HeadRow
from benchmarks.lyanna.coverage import SHARES
from benchmarks.lyanna.parts import LYANNA_HOT, MERGE, REPLACE
from benchmarks.lyanna.rows import ACCURACY

Row = dict[str, Any]
NOTE = (
    "Speed-ups are over plain vLLM at the same batch size. The paper's 3.3× is over "
    "speculative decoding with a draft model; its figures have no plain decoding."
)
RATIOS: Columns = {
    "of": "{of}",
    "ratio": "{ratio}",
    "batch size or depth": "{at}",
    "median": "{median:.3f}",
    "min": "{min:.3f}",
    "max": "{max:.3f}",
}
FIGURE12: Columns = {
    "batch": "{cell.batch_size}",
    **COLUMNS,
    "leftover nodes": "{leftover_nodes:.2f}",
    "of them accepted": "{leftover_accepted:.3f}",
}
TABLE1: Columns = {
    "head": lambda row: f"{row['label']} ({row['side'].removeprefix('table1-')})",
    **{
        f"step {n + 1}": f"{{steps[{n}][share]:.1%}} ± {{steps[{n}][error]:.1%}}"
        for n in range(3)
    },
    "tokens/step": "{length:.2f}",
    "trees": "{trees}",
}
OUTPUT: Columns = {
    "side": "{side}",
    "5 rows at once, ms": "{once_ms:.3f}",
    "one by one, ms": "{rows_ms:.3f}",
    "ratio": lambda row: f"{row['once_ms'] / row['rows_ms']:.3f}",
    "softmax at once, ms": "{softmax_once_ms:.3f}",
    "softmax one by one, ms": "{softmax_rows_ms:.3f}",
}
DRAFTING: Columns = {
    "side": "{side}",
    "depth": "{depth}",
    "drafting, ms": "{draft:.2f}",
    "head's forwards": "{draft_forward:.2f}",
    "committed tokens": "{pairs:.2f}",
    "levels": "{levels:.2f}",
}
COVERAGE: Columns = {
    "share of tokens": "{share:.1%}",
    "tokens": "{tokens}",
    "share of occurrences": "{occurrences:.2%}",
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
    parts: dict[str, tuple[Sequence[Any], Columns]] = {
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
    texts = [*report.sections(parts), NOTE]
    report.write_markdown(out, "Lyanna's evidence", texts, content)
    draw(rows, content, out)


def table2(curves: Sequence[Row]) -> tuple[list[Row], Columns]:
    """Accuracies by step, a column for each head."""
    steps: dict[int, Row] = {}
    columns = {"step": "{step}"}
    for point in curves:
        if point["metric"] == ACCURACY:
            at, head = point["step"], point["head"]
            row = steps.setdefault(at, {"step": at, "heads": {}})
            row["heads"][head] = point["value"]
            columns[head] = f"{{heads[{head}]:.2%}}"
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
