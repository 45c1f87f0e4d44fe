"""Plots: lines over a number, a panel for each value of one or two columns."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.harness.options import console

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# An axis of more values gets ticks at round numbers.
MOST_TICKS = 8


def seaborn(path: Path) -> Any:
    """Import seaborn with our style; None, with a message, where it is missing.

    A machine with a GPU need not have it: tables do without, plots are made elsewhere.
    """
    if find_spec("seaborn") is None:
        console.print(
            f"no {path.name}: install 'vllm-treespec[benchmarks]', then run "
            f"python -m benchmarks report {path.parent}"
        )
        return None
    import matplotlib

    matplotlib.use("Agg")
    import seaborn

    seaborn.set_theme(style="whitegrid", font_scale=0.8)
    return seaborn


def save(figure: Any, path: Path) -> None:
    """Write a picture and forget it."""
    from matplotlib import pyplot

    figure.savefig(path, dpi=130, bbox_inches="tight")
    pyplot.close(figure)


def frame_of(rows: Sequence[Mapping[str, Any]], y: str) -> Any:
    """Make a data frame of the rows that have a ``y``."""
    import pandas

    return pandas.DataFrame([row for row in rows if row[y] is not None])


def line_panels(
    rows: Sequence[Mapping[str, Any]],
    path: Path,
    *,
    log_x: bool = False,
    level: float | None = None,
    **columns: Any,
) -> None:
    """Draw lines through rows that have a ``y``, and a dotted line at ``level``.

    ``columns`` are those of ``seaborn.relplot``: x, y, hue, style, col, row.
    """
    if (sns := seaborn(path)) is None or (frame := frame_of(rows, columns["y"])).empty:
        return
    line: dict[str, Any] = {"kind": "line", "marker": "o", "errorbar": None}
    facets = {"sharey": False, "sharex": "col"}
    grid = sns.relplot(frame, height=3.2, facet_kws=facets, **(line | columns))
    both = columns.get("row") and columns.get("col")
    grid.set_titles("{row_name}, {col_name}" if both else "{col_name}")
    ticks = sorted(frame[columns["x"]].unique())
    for axis in grid.axes.flat:
        if log_x:
            axis.set_xscale("log", base=2)
        if log_x or len(ticks) <= MOST_TICKS:
            axis.set_xticks(ticks, labels=[f"{tick:g}" for tick in ticks])
        if level is not None:
            axis.axhline(level, color="black", linestyle=":", linewidth=1)
    save(grid.figure, path)


def bar_panels(
    rows: Sequence[Mapping[str, Any]],
    path: Path,
    *,
    level: float | None = None,
    aspect: float = 2.5,
    height: float = 3.2,
    **columns: Any,
) -> None:
    """Draw a group of bars for each ``x``; see :func:`line_panels`."""
    if (sns := seaborn(path)) is None or (frame := frame_of(rows, columns["y"])).empty:
        return
    share = {"sharex": False, "sharey": False, "errorbar": None}
    size: dict[str, Any] = {"height": height, "aspect": aspect}
    grid = sns.catplot(frame, kind="bar", **size, **(share | columns))
    if columns.get("row") and not columns.get("col"):
        grid.set_titles("{row_name}")
    for axis in grid.axes.flat:
        if level is not None:
            axis.axhline(level, color="black", linewidth=0.8)
    save(grid.figure, path)


def side_by_side(
    path: Path, *panels: Callable[[Axes], None], columns: int | None = None
) -> None:
    """Draw panels, ``columns`` beside each other, each by a function of its own."""
    columns = columns or len(panels)
    lines = -(-len(panels) // columns)
    if seaborn(path) is None:
        return
    from matplotlib import pyplot

    size = (5 * columns, 4.2 * lines)
    figure, _ = pyplot.subplots(lines, columns, figsize=size, layout="constrained")
    for axis, fill in zip_longest(figure.axes, panels):
        axis.remove() if fill is None else fill(axis)
    save(figure, path)
