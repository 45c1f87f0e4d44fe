"""Tables and pictures, from results.json alone."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.eagle import plain_step
from benchmarks.eagle.trainings import curve_points, sections
from benchmarks.harness import plot, report
from benchmarks.harness.report import Columns, Content
from benchmarks.harness.rows import COLUMNS, HeadRow
from vllm_treespec.batch.stats import KEEP_FEATURES
from vllm_treespec.tools.sides import PLAIN


def levels_ms(row: HeadRow) -> float:
    """Milliseconds of the head's levels; of other drafters all forwards."""
    return row.stage_ms.get("levels", row.stage_ms["draft_forward"])


def tree_ms(row: HeadRow) -> float:
    """Milliseconds of drafting and laying out, without the head."""
    others = sum(row.stage_ms.get(name, 0.0) for name in ("pairs", KEEP_FEATURES))
    drafting = row.stage_ms["tree_build"] + row.stage_ms["draft"]
    return drafting - levels_ms(row) - others


def step_ms(row: HeadRow) -> float:
    """Milliseconds of the whole step, scheduler and prompt reading included."""
    return row.stage_ms["forward"] / row.stage_shares["forward"]


PROFILE: Columns = {
    "side": "{side}",
    "target": "{stage_ms[forward]:.2f}",
    "head: committed tokens": "{stage_ms[pairs]:.2f}",
    "head: levels": lambda row: f"{levels_ms(row):.2f}",
    "keeping features": f"{{stage_ms[{KEEP_FEATURES}]:.2f}}",
    "tree": lambda row: f"{tree_ms(row):.2f}",
    "scoring": "{stage_ms[score]:.2f}",
    "commit": "{stage_ms[commit]:.2f}",
    "step": lambda row: f"{step_ms(row):.2f}",
}


def render(content: Content, out: Path) -> None:
    """Write what is finished of each part, and pictures of it."""
    rows = [HeadRow.model_validate(row) for row in content["rows"]]
    trainings = content["trainings"]
    tables: dict[str, tuple[Sequence[Any], Columns]] = {}
    for temperature in dict.fromkeys(row.cell.temperature for row in rows):
        here = [row for row in rows if row.cell.temperature == temperature]
        timed = [row for row in here if row.stage_shares.get("forward")]
        tables[f"T = {temperature:g}"] = here, COLUMNS
        tables[f"Milliseconds of a step, T = {temperature:g}"] = timed, PROFILE
    steps = content["plain_steps"], plain_step.COLUMNS
    tables["A step without trees, by round"] = steps
    parts = [*report.sections(tables), *sections(trainings)]
    report.write_markdown(out, "EAGLE heads", parts, content)
    draw(rows, trainings, out)


def draw(rows: Sequence[HeadRow], trainings: Sequence[Any], out: Path) -> None:
    """Draw tokens per step over drafts, speed-ups, and the scaling curve."""
    points = [
        {
            "draft tokens": row.budget,
            "tokens per target step": row.acceptance_length,
            "speed-up over plain": row.speedup,
            "kind": row.kind,
            "side": row.side,
            "temperature": f"T = {row.cell.temperature:g}",
        }
        for row in rows
        if row.family != PLAIN
    ]
    axes: dict[str, Any] = {
        "x": "draft tokens",
        "y": "tokens per target step",
        "hue": "kind",
    }
    plot.line_panels(points, out / "tokens.png", **axes, col="temperature")
    bars: dict[str, Any] = {
        "x": "speed-up over plain",
        "y": "side",
        "row": "temperature",
    }
    plot.bar_panels(points, out / "speed.png", **bars, aspect=1.5, height=6)
    curve: dict[str, Any] = {"x": "share of the text", "hue": "head", "col": "by"}
    curve["y"] = "tokens a step of a chain"
    plot.line_panels(curve_points(trainings), out / "scaling.png", **curve)
