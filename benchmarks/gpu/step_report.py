"""JSON, Markdown and plot of the step table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes

from benchmarks.gpu.cells import write_json
from benchmarks.gpu.engines import PLAIN_DEFAULT, PLAIN_SYNC, SIDES_NOTE, EngineCell
from benchmarks.markdown import table
from benchmarks.plot import plt
from benchmarks.report import listing, number

STAGES = ("tree_build", "score", "commit", "draft")
NOTES = (
    "Random weights; a drafter that costs nothing, whose nodes are accepted by coins "
    "at a fixed rate: the text is nonsense and only the time counts. A window of steps "
    "in which all requests decode; step: wall time over steps. Forward: the target's "
    "layers and its output layer by CUDA events. Outside: the step without them; "
    "scheduling, inputs, scoring, commit, drafting. Tree_build, score, commit and "
    "draft are those parts by the host's clock, which includes waiting for the card "
    "where one of them waits. " + SIDES_NOTE
)


def write(
    cells: Sequence[EngineCell],
    origin: dict[str, Any],
    failed: Mapping[str, str],
    out: Path,
) -> None:
    """Write results.json, results.md and results.png."""
    write_json(out / "results.json", origin, cells, failed=dict(failed))
    (out / "results.md").write_text(markdown(cells, origin, failed), encoding="utf-8")
    draw(cells, out / "results.png")


def markdown(
    cells: Sequence[EngineCell], origin: Mapping[str, Any], failed: Mapping[str, str]
) -> str:
    """Write one table per shape, and where the numbers come from."""
    parts = ["# Engine step", NOTES, "![](results.png)"]
    for shape in dict.fromkeys(cell.shape for cell in cells):
        parts.append(f"## {shape}")
        parts.append(step_table([cell for cell in cells if cell.shape == shape]))
    parts += ["## What vLLM chose", listing(choices(cells))]
    if failed:
        parts += ["## Failed", listing(failed)]
    parts += ["## Provenance", listing(origin)]
    return "\n\n".join(parts) + "\n"


def choices(cells: Sequence[EngineCell]) -> dict[str, dict[str, str]]:
    """Runner, scheduling, graphs and attention of every side."""
    return {cell.side: cell.chosen for cell in cells}


def plain_ms(cells: Sequence[EngineCell], like: EngineCell, side: str) -> float | None:
    """Step of a plain side of the same shape and batch size."""
    for cell in cells:
        if cell.side == side and same_place(cell, like):
            return cell.step_ms
    return None


def same_place(one: EngineCell, other: EngineCell) -> bool:
    """Whether two cells have the same shape and batch size."""
    return (one.shape, one.work.batch) == (other.shape, other.work.batch)


def ratio(value: float | None, to: float | None) -> float | None:
    """One number over another, if there are both."""
    return None if value is None or to is None else value / to


def step_table(cells: Sequence[EngineCell]) -> str:
    """Write the cells of one shape."""
    headings = ["side", "batch", "step ms", "/ v1-sync", "/ default", "forward ms"]
    headings += ["outside ms", *(f"{stage} ms" for stage in STAGES)]
    headings += ["tokens/step", "tokens/s"]
    lines = []
    for cell in sorted(cells, key=place):
        forward = sum(cell.forward_ms.values()) if cell.forward_ms else None
        lines.append(
            [
                cell.side,
                str(cell.work.batch),
                number(cell.step_ms, "{:.2f}"),
                *(
                    number(ratio(cell.step_ms, plain_ms(cells, cell, side)), "{:.2f}×")
                    for side in (PLAIN_SYNC, PLAIN_DEFAULT)
                ),
                number(forward, "{:.2f}"),
                number(cell.outside_ms, "{:.2f}"),
                *(number(cell.stage_ms.get(stage), "{:.2f}") for stage in STAGES),
                number(cell.acceptance_length, "{:.2f}"),
                f"{cell.tokens_per_s:.0f}",
            ]
        )
    return table(headings, lines)


def place(cell: EngineCell) -> tuple[int, int, str]:
    """Place of a cell in its table."""
    return cell.work.batch, cell.nodes, cell.side


def draw(cells: Sequence[EngineCell], path: Path) -> None:
    """Save the plot: step and forward over nodes, a panel per shape and batch size."""
    shapes = list(dict.fromkeys(cell.shape for cell in cells))
    batches = sorted({cell.work.batch for cell in cells})
    figure, axes = plt.subplots(
        len(shapes),
        len(batches),
        figsize=(4.2 * len(batches), 3.4 * len(shapes)),
        layout="constrained",
        squeeze=False,
    )
    for row, shape in zip(axes, shapes, strict=True):
        for axis, batch in zip(row, batches, strict=True):
            panel(
                axis,
                [c for c in cells if c.shape == shape and c.work.batch == batch],
            )
            axis.set_title(f"{shape}, batch {batch}", fontsize=9)
    figure.suptitle("ms per step over nodes of a tree")
    figure.savefig(path, dpi=120)
    plt.close(figure)


def panel(axis: Axes, cells: Sequence[EngineCell]) -> None:
    """Draw our steps over nodes, and the plain ones as levels."""
    ours = sorted((cell for cell in cells if cell.nodes), key=lambda cell: cell.nodes)
    if ours:
        nodes = [cell.nodes for cell in ours]
        steps = [cell.step_ms or 0.0 for cell in ours]
        forwards = [sum(cell.forward_ms.values()) for cell in ours]
        axis.plot(nodes, steps, marker="o", color="tab:red", label="ours: step")
        axis.plot(nodes, forwards, "--", color="tab:red", label="ours: forward")
    for side, colour in ((PLAIN_SYNC, "tab:blue"), (PLAIN_DEFAULT, "black")):
        for cell in cells:
            if cell.side == side and cell.step_ms is not None:
                axis.axhline(cell.step_ms, color=colour, label=side)
    axis.set_ylim(bottom=0)
    axis.grid(alpha=0.3)
    if axis.get_legend_handles_labels()[0]:
        axis.legend(fontsize=7)
