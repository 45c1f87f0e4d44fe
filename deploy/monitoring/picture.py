"""Draws the board's panels from a Prometheus server, for where no Grafana is at hand.

python -m deploy.monitoring.picture --prometheus http://localhost:9090 --out board.png
"""

from __future__ import annotations

import json
import time
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Annotated

import typer

BOARD = Path(__file__).with_name("board.json")
COLUMNS = 3
# Points of each line.
POINTS = 120


def picture(
    prometheus: Annotated[str, typer.Option(help="Address of the server.")] = (
        "http://localhost:9090"
    ),
    minutes: Annotated[float, typer.Option(min=0.5, help="Until now.")] = 15.0,
    rate_seconds: Annotated[
        int, typer.Option(min=2, help="Rates are over so many seconds.")
    ] = 60,
    out: Annotated[Path, typer.Option(help="PNG file.")] = Path("board.png"),
) -> None:
    """Draw every panel of the board."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    board = json.loads(BOARD.read_text(encoding="utf-8"))
    panels = [panel for panel in board["panels"] if panel.get("targets")]
    lines = -(-len(panels) // COLUMNS)
    size = (5 * COLUMNS, 2.6 * lines)
    figure, grid = pyplot.subplots(lines, COLUMNS, figsize=size, squeeze=False)
    end = time.time()
    for panel, axis in zip(panels, grid.flat, strict=False):
        axis.set_title(panel["title"], fontsize=9)
        axis.set_xlabel("minutes ago", fontsize=7)
        axis.tick_params(labelsize=7)
        for target in panel["targets"]:
            query = target["expr"].replace("$__rate_interval", f"{rate_seconds}s")
            query = query.replace("$model_name", ".*")
            for labels, points in series(prometheus, query, end, minutes):
                label = label_of(target.get("legendFormat", ""), labels)
                axis.plot(*points, label=label, linewidth=1)
        if axis.get_lines():
            axis.legend(fontsize=6, loc="upper left")
        axis.set_ylim(bottom=0)
        axis.invert_xaxis()
    for axis in grid.flat[len(panels) :]:
        axis.set_axis_off()
    figure.tight_layout()
    figure.savefig(out, dpi=90)
    typer.echo(f"wrote {out}")


def series(
    prometheus: str, query: str, end: float, minutes: float
) -> list[tuple[dict[str, str], tuple[list[float], list[float]]]]:
    """Ask Prometheus for a query's lines: labels, and minutes before ``end`` by value.

    Raises:
        urllib.error.URLError: no server answers there.

    """
    start, step = end - 60 * minutes, 60 * minutes / POINTS
    fields = {"query": query, "start": start, "end": end, "step": step}
    url = f"{prometheus}/api/v1/query_range?{urllib.parse.urlencode(fields)}"
    with urllib.request.urlopen(url, timeout=30) as answer:
        found = json.load(answer)["data"]["result"]
    return [
        (
            line["metric"],
            (
                [(end - at) / 60 for at, _ in line["values"]],
                [float(value) for _, value in line["values"]],
            ),
        )
        for line in found
    ]


def label_of(form: str, labels: dict[str, str]) -> str:
    """Fill in a Grafana legend such as ``{{stage}}``."""
    for name, value in labels.items():
        form = form.replace("{{" + name + "}}", value)
    return form


if __name__ == "__main__":
    typer.run(picture)
