"""What a search found: a table, sentences, a picture, files."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rich.table import Table

from vllm_treespec.tools.sides import PLAIN, Cell
from vllm_treespec.tools.tune.choose import LEAST, Choice, best_by_work
from vllm_treespec.tools.tune.search import TreeRow

# Of each load the fastest trees, and plain.
MOST_ROWS = 4


def load_name(cell: Cell) -> str:
    """Say what load a row is of."""
    size = cell.batch_size
    requests = "1 request" if size == 1 else f"{size} requests"
    return f"{cell.workload}, {requests} at a time, temperature {cell.temperature:g}"


def tree_name(tree: Mapping[str, Any] | None) -> str:
    """Sizes of a tree, in the order of its keys."""
    return "–" if tree is None else " x ".join(str(value) for value in tree.values())


def tables(rows: Sequence[TreeRow]) -> list[Table]:
    """A table for each load: plain, and the fastest trees."""
    loads = {row.cell.name: row.cell for row in rows}
    found = []
    for name, cell in loads.items():
        table = Table(title=load_name(cell), title_justify="left")
        table.add_column("method")
        table.add_column("tree")
        for heading in ("tokens/s", "speed-up", "tokens a step", "rounds"):
            table.add_column(heading, justify="right")
        here = [row for row in rows if row.cell.name == name]
        here.sort(key=lambda row: -row.tokens_per_s)
        shown = [*here[:MOST_ROWS], *(r for r in here[MOST_ROWS:] if r.side == PLAIN)]
        for row in shown:
            table.add_row(
                row.side,
                tree_name(row.tree),
                f"{row.tokens_per_s:.1f}",
                "–" if row.speedup is None else f"{row.speedup:.2f}x",
                "–" if not row.acceptance_length else f"{row.acceptance_length:.2f}",
                str(row.rounds),
            )
        found.append(table)
    return found


def sentences(rows: Sequence[TreeRow], choice: Choice) -> list[str]:
    """Which work wants what, and what was chosen."""
    lines = []
    for row in best_by_work(rows).values():
        if row.side == PLAIN or (row.speedup or 1.0) < LEAST:
            lines.append(f"{load_name(row.cell)}: nothing is faster than plain vLLM.")
        else:
            lines.append(
                f"{load_name(row.cell)}: {row.side} with {tree_name(row.tree)} is "
                f"fastest, {row.speedup:.2f}x plain."
            )
    if choice.spec is None:
        return [*lines, "Over all loads plain vLLM is best: use no speculative_config."]
    lines.append(
        f"Over all loads {choice.side} is best: {choice.speedup:.2f}x on the "
        "geometric mean."
    )
    if choice.slower:
        lines.append(
            "Some work is slower with these trees, so the choice is left "
            "to the measured schedule, which tells requests apart while it serves."
        )
    return lines


def write_files(
    out: Path, rows: Sequence[TreeRow], choice: Choice, failed: Mapping[str, str]
) -> None:
    """Write rows and failures to tune.json, what is faster than plain to spec.json, and
    a picture of the speed-ups to tune.png."""
    content = {
        "rows": [row.model_dump(mode="json") for row in rows],
        "speedup": choice.speedup,
        "failed": dict(failed),
    }
    out.mkdir(parents=True, exist_ok=True)
    (out / "tune.json").write_text(json.dumps(content, indent=1) + "\n")
    spec = out / "spec.json"
    spec.unlink(missing_ok=True)
    if choice.spec is not None:
        spec.write_text(json.dumps(choice.spec, indent=1) + "\n")
    if find_spec("matplotlib") is not None:
        draw(rows, out / "tune.png")


def draw(rows: Sequence[TreeRow], path: Path) -> None:
    """Draw the best speed-up of each method under each load."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    loads = {row.cell.name: load_name(row.cell) for row in rows}
    sides = [side for side in dict.fromkeys(row.side for row in rows) if side != PLAIN]
    height = 0.8 / max(len(sides), 1)
    figure, axis = pyplot.subplots(figsize=(8, 1 + 0.25 * len(loads) * len(sides)))
    for number, side in enumerate(sides):
        best = [
            max(
                (
                    row.speedup or 0.0
                    for row in rows
                    if (row.side, row.cell.name) == (side, load)
                ),
                default=0.0,
            )
            for load in loads
        ]
        places = [place + number * height for place in range(len(loads))]
        axis.barh(places, best, height, label=side)
    axis.axvline(1.0, color="black", linewidth=0.8)
    axis.set_yticks([place + 0.4 for place in range(len(loads))], list(loads.values()))
    axis.invert_yaxis()
    axis.set_xlabel("speed-up over plain vLLM, best tree of each method")
    axis.legend(fontsize="small")
    figure.savefig(path, dpi=130, bbox_inches="tight")
    pyplot.close(figure)
