"""The step table: what a step with draft trees costs beside a plain one.

    python -m benchmarks.gpu.step --out DIR

docs/gpu.md says what is measured and how.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from benchmarks import provenance
from benchmarks.gpu import step_report
from benchmarks.gpu.card import (
    NoCardError,
    describe_card,
    origin,
    require_card,
    versions,
)
from benchmarks.gpu.cells import CellFolder, settings_of
from benchmarks.gpu.engines import (
    EngineCell,
    EngineSide,
    Options,
    Work,
    our_side,
    plain_sides,
    run_tasks,
    tasks_of,
)
from benchmarks.gpu.kernel import Commit, Numbers, Out, Report, Shapes, numbers
from benchmarks.gpu.shapes import CARD_SHAPES, known_shapes

MODULE = "benchmarks.gpu.step"
console = Console(stderr=True, soft_wrap=True)

Context = Annotated[int, typer.Option(min=1, help="Tokens of each prompt.")]
Steps = Annotated[int, typer.Option(min=1, help="Timed steps of a cell.")]
Rate = Annotated[
    float, typer.Option(min=0, max=1, help="Of a node whose parent is accepted.")
]
Temperature = Annotated[float, typer.Option(min=0)]
Extra = Annotated[
    str, typer.Option(help="More arguments of vLLM for all sides, as JSON.")
]
Names = Annotated[str, typer.Option(help="Only these sides, comma-separated.")]
Smoke = Annotated[
    bool, typer.Option("--smoke", help="Tiny engines on this machine, nothing kept.")
]


def step(
    nodes: Numbers = "32,8,16,64,1",
    batches: Numbers = "1,8,32",
    shapes: Shapes = CARD_SHAPES,
    context: Context = 512,
    steps: Steps = 100,
    acceptance: Rate = 0.7,
    temperature: Temperature = 0.0,
    sides: Names = "",
    extra: Extra = "{}",
    commit: Commit = "",
    out: Out = Path("runs/gpu-step"),
    report: Report = False,
    smoke: Smoke = False,
) -> None:
    """Time engine steps of trees and of plain decoding: JSON, Markdown, plot."""
    try:
        if smoke:
            try_tiny_engines()
            return
        failed: dict[str, str] = {}
        if not report:
            require_card()
            options = Options(context, steps, temperature, known(extra))
            told = settings_of(describe_card(), versions(), vars(options), acceptance)
            chosen = [*plain_sides(), *map(our_side, numbers(nodes, "--nodes"))]
            failed = measure(
                known_shapes(shapes),
                choose(chosen, sides),
                numbers(batches, "--batches"),
                acceptance,
                options,
                CellFolder(out, EngineCell, told),
                commit or provenance.commit(),
            )
        write_reports(out, commit, failed)
    except (NoCardError, ValueError) as error:
        console.print(f"step: {error}", markup=False)
        raise typer.Exit(1) from None
    if failed:
        raise typer.Exit(1)


def known(extra: str) -> dict[str, Any]:
    """Read `--extra`."""
    try:
        found = json.loads(extra)
    except json.JSONDecodeError as error:
        raise ValueError(f"--extra {extra!r} is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise ValueError(f"--extra {extra!r} must be one JSON object")
    return found


def choose(sides: Sequence[EngineSide], text: str) -> list[EngineSide]:
    """Keep the sides that `--sides` names; all when it names none."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if name not in [side.name for side in sides]:
            there = ", ".join(side.name for side in sides)
            raise ValueError(f"--sides: there is no {name!r}; there are {there}")
    return [side for side in sides if not names or side.name in names]


def work_of(
    shape: str, side: EngineSide, batches: Sequence[int], rate: float, options: Options
) -> list[Work]:
    """Cells of one side."""
    return [
        options.work(
            f"{shape}-{side.name}-b{batch}",
            "steps",
            batch,
            rate if side.nodes else None,
        )
        for batch in batches
    ]


def measure(
    shapes: Sequence[str],
    sides: Sequence[EngineSide],
    batches: Sequence[int],
    rate: float,
    options: Options,
    folder: CellFolder[EngineCell],
    commit: str | None,
) -> dict[str, str]:
    """Measure the cells that are not finished; returns why engines failed."""
    folder.read()
    tasks = []
    for shape in shapes:
        work = {s.name: work_of(shape, s, batches, rate, options) for s in sides}
        tasks += tasks_of(shape, work, sides, options, folder, commit)
    console.print(f"{sum(len(t.work) for t in tasks)} cells in {len(tasks)} engines")
    return run_tasks(tasks, console)


def try_tiny_engines() -> None:
    """Run tiny engines on this machine's CPU and print their table.

    Raises:
        ValueError: when one failed.

    """
    options = Options(20, 5, 0.0, {"enforce_eager": True}, "float32", "cpu")
    sides = [plain_sides()[0], our_side(8), our_side(1)]
    with tempfile.TemporaryDirectory() as out:
        folder = CellFolder(Path(out), EngineCell, "smoke")
        failed = measure(["tiny"], sides, [1, 3], 0.7, options, folder, None)
        cells = folder.read()
    console.print(step_report.step_table(cells), markup=False)
    if failed:
        raise ValueError("; ".join(failed.values()))


def write_reports(out: Path, commit: str, failed: dict[str, str]) -> None:
    """Write results.json, results.md and results.png from finished cells."""
    cells = CellFolder(out, EngineCell, None).read()
    if not cells:
        raise ValueError(f"{out} holds no finished cells")
    step_report.write(cells, origin(MODULE, commit), failed, out)
    console.print(f"wrote results.json, results.md and results.png to {out}")


if __name__ == "__main__":
    typer.run(step)
