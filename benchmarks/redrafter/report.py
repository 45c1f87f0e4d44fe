"""Tables and pictures, from results.json alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness import plot, report
from benchmarks.harness.report import Columns, Content
from benchmarks.harness.rows import SPEEDS
from benchmarks.redrafter.parts import PARTS, WITHOUT, head_of
from benchmarks.redrafter.rows import Row

# Columns of a row, and the titles of their panels.
TABLE1_PANELS = {
    "tokens_per_s": "tokens/s",
    "speedup": "speed-up over plain",
    "tokens_per_step": "tokens per target step",
    "quality": "log-likelihood per token (nats)",
}
TABLE2_PANELS = {
    "speedup": "speed-up over plain at this temperature",
    "tokens_per_step": "tokens per target step",
    "quality_gain": "log-likelihood per token − plain greedy's (nats)",
}
FIGURE5_PANELS = {"tokens_per_step": "tokens per target step"}
FIGURE6_PANELS = {"per_request": "tokens/s per request", "tokens_per_s": "throughput"}
SIZE_LINES = {
    "num_candidates": "without tree attention",
    "high": "with: 99th percentile",
    "mean": "with: mean",
    "low": "with: 1st percentile",
}
# Lines and bars go through the mean of two points, error bars from one to the other.
ERRORS: dict[str, Any] = {"errorbar": ("pi", 100)}


def mean(name: str, digits: int = 2) -> str:
    """Make a column of means with their errors."""
    return f"{{{name}[mean]:.{digits}f}} ± {{{name}[error]:.{digits}f}}"


SPEED: Columns = {"tokens/s (min–max)": SPEEDS, "tokens/step": mean("tokens_per_step")}
TABLE1_COLUMNS: Columns = {
    "side": "{label}",
    "head parameters": "{parameters:.2f} M",
    "T": "{temperature:g}",
    **SPEED,
    "speed-up": "{speedup:.2f}×",
    "quality": mean("quality", 3),
    "quality − plain greedy's": mean("quality_gain", 3),
    "rounds": "{rounds}",
}
TABLE2_COLUMNS: Columns = {
    "acceptance": "{label}",
    "T": "{temperature:g}",
    **SPEED,
    "speed-up at this T": "{speedup:.2f}×",
    "over plain greedy": "{speedup_over_greedy:.2f}×",
    "quality": mean("quality", 3),
    "quality gain": mean("quality_gain", 3),
    "rounds": "{rounds}",
}
SIZE_COLUMNS: Columns = {
    "beam width × length": "{beam_width} × {length}",
    "without": "{num_candidates}",
    "with: mean": "{mean:.1f}",
    "1st percentile": "{low}",
    "99th percentile": "{high}",
    "ratio": lambda row: f"{row['num_candidates'] / row['mean']:.2f}",
    "trees": "{num_trees}",
}
FIGURE6_COLUMNS: Columns = {
    "side": "{label}",
    "batch": "{batch_size}",
    "tokens/s per request": lambda r: f"{r['tokens_per_s'] / r['batch_size']:.1f}",
    **SPEED,
    "speed-up": "{speedup:.2f}×",
    "draft tokens per tree": "{mean_drafts:.1f}",
    "rounds": "{rounds}",
}
STRETCH = mean("tokens_per_step")


def render(content: Content, out: Path) -> None:
    """Write what is finished of each part, and pictures of it."""
    of = {part: [r for r in content["rows"] if r["part"] == part] for part in PARTS}
    table1, table2, figure6 = of["table1"], of["table2"], of["figure6"]
    for row in table1:
        count = content["parameters"].get(head_of(row["side"]))
        row["parameters"] = count and count / 1e6
    spans, sizes = content["stretches"], content["compressions"]
    texts = report.sections(
        {
            "Table 1: Medusa and ReDrafter": (table1, TABLE1_COLUMNS),
            "Table 2: acceptance by temperature": (table2, TABLE2_COLUMNS),
        }
    )
    if spans:
        texts += ["## Figure 5a: tokens per step", stretch_table(spans)]
    texts += report.sections(
        {
            "Figure 5b: compression by tree attention": (sizes, SIZE_COLUMNS),
            "Figure 6: speed and throughput": (figure6, FIGURE6_COLUMNS),
        }
    )
    report.write_markdown(out, "ReDrafter's evidence", texts, content)
    draw_tables(table1, table2, out)
    draw_figures(spans, sizes, figure6, out)


def stretch_table(stretches: Sequence[Row]) -> str:
    """Write tokens per step: beam widths by stretches of the answers."""
    return report.grid(
        ["beam width"],
        {s["first"]: f"tokens {s['first']}–{s['last']}" for s in stretches},
        {
            ((str(s["beam_width"]),), s["first"]): report.written(s, STRETCH)
            for s in stretches
        },
    )


def ends(value: Any) -> list[float | None]:
    """Both ends of a mean's error bar, or the value alone."""
    if not isinstance(value, dict):
        return [value]
    return [value["mean"] - value["error"], value["mean"] + value["error"]]


def points(rows: Sequence[Row], titles: Mapping[str, str]) -> list[Row]:
    """Make a point of each titled value in each row, two of a mean with its error."""
    return [
        {**row, "panel": title, "value": end}
        for name, title in titles.items()
        for row in rows
        for end in ends(row[name])
    ]


def draw(
    rows: Sequence[Row], titles: Mapping[str, str], path: Path, **more: Any
) -> None:
    """Draw a panel of lines for each title."""
    panels = {"y": "value", "col": "panel", "err_style": "bars", **ERRORS, **more}
    plot.line_panels(points(rows, titles), path, **panels)


def draw_tables(table1: Sequence[Row], table2: Sequence[Row], out: Path) -> None:
    """Draw bars of table 1, and table 2 over the temperature."""
    plain = {"tokens_per_step": 1.0}
    bars = [row if row["tokens_per_step"] else {**row, **plain} for row in table1]
    panels: dict[str, Any] = {"x": "value", "y": "label", "row": "panel", **ERRORS}
    plot.bar_panels(points(bars, TABLE1_PANELS), out / "table1.png", **panels)
    warm = [row for row in table2 if row["temperature"]]
    draw(warm, TABLE2_PANELS, out / "table2.png", x="temperature", hue="label")


def draw_figures(
    stretches: Sequence[Row], sizes: Sequence[Row], figure6: Sequence[Row], out: Path
) -> None:
    """Draw figure 5 over the answer's length and the tree, figure 6 over the batch."""
    x = "output tokens before the step"
    rows = [{**s, x: (s["first"] + s["last"]) / 2} for s in stretches]
    palette = {"hue": "beam_width", "palette": "flare"}
    draw(rows, FIGURE5_PANELS, out / "figure5.png", x=x, legend="full", **palette)
    x = "beam width × length"
    rows = [{**s, x: s["num_candidates"]} for s in sizes]
    draw(rows, SIZE_LINES, out / "figure5b.png", x=x, hue="panel", col=None)
    x = "requests at a time"
    rows = [
        {
            **row,
            x: row["batch_size"],
            "per_request": row["tokens_per_s"] / row["batch_size"],
            "side": row["label"].removesuffix(WITHOUT),
            "tree attention": "without" if row["label"].endswith(WITHOUT) else "with",
        }
        for row in figure6
    ]
    hues = {"hue": "side", "style": "tree attention"}
    draw(rows, FIGURE6_PANELS, out / "figure6.png", x=x, log_x=True, **hues)
