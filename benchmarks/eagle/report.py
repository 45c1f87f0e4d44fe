"""Tables and pictures, from results.json alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.eagle.trainings import curve_points, sections
from benchmarks.harness import plot, report
from benchmarks.harness.head_rows import COLUMNS, HeadRow
from benchmarks.harness.report import Content, column, number
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


def stage(name: str) -> Callable[[HeadRow], str]:
    """A column of a stage's milliseconds, where there is such a stage."""
    return lambda row: number(row.stage_ms.get(name), "{:.2f}")


PROFILE: report.Columns[HeadRow] = {
    "side": lambda row: row.side,
    "target": stage("forward"),
    "head: committed tokens": stage("pairs"),
    "head: levels": lambda row: f"{levels_ms(row):.2f}",
    "keeping features": stage(KEEP_FEATURES),
    "tree": lambda row: f"{tree_ms(row):.2f}",
    "scoring": stage("score"),
    "commit": stage("commit"),
    "step": lambda row: f"{step_ms(row):.2f}",
}
PLAIN_STEP: report.Columns[Any] = {
    "answers": column("answers", "{}"),
    "without trees, ms": column("ours_ms", "{:.3f}"),
    "plain vLLM, ms": column("plain_ms", "{:.3f}"),
    "ratio": column("ratio", "{:.4f}"),
    "our stages, ms": column("own_ms", "{:.3f}"),
    "of it keeping features": column("features_ms", "{:.3f}"),
}


def render(content: Content, out: Path) -> None:
    """Write what is finished of each part, and pictures of it."""
    rows = [HeadRow.model_validate(row) for row in content["rows"]]
    plain_steps, trainings = content["plain_steps"], content["trainings"]
    parts: list[str] = []
    for temperature in dict.fromkeys(row.cell.temperature for row in rows):
        here = [row for row in rows if row.cell.temperature == temperature]
        parts += [f"## T = {temperature:g}", report.table_of(here, COLUMNS)]
        timed = [row for row in here if row.stage_shares.get("forward")]
        if timed:
            heading = f"## Milliseconds of a step, T = {temperature:g}"
            parts += [heading, report.table_of(timed, PROFILE)]
    if plain_steps:
        table = report.table_of(plain_steps, PLAIN_STEP)
        parts += ["## A step without trees, by round", table]
    report.write_markdown(out, "EAGLE heads", [*parts, *sections(trainings)], content)
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
