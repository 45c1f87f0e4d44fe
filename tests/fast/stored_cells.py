"""Results as engines would have stored them, and the reports that are made of them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from benchmarks.__main__ import app
from benchmarks.harness import plot
from benchmarks.harness.plan import Plan
from benchmarks.harness.rescoring import name_of, split_scores
from vllm_treespec.tools.sides import Cell, CellResult, Side


def measured(cell: Cell, seconds: float = 1.0, **fields: Any) -> CellResult:
    """The result of a cell, without answers where no fields say what they were."""
    nothing: dict[str, Any] = {"num_tokens": [], "tpot_ms": [], "token_ids": []}
    return CellResult(cell=cell, seconds=seconds, **{**nothing, **fields})


def keep(mine: Plan, side: Side, result: CellResult, round_: int = 0) -> None:
    """Store what a side measured in a round."""
    mine.keep(mine.job.model_copy(update={"side": side}), round_, result)


def store_scores(rescoring: Plan, mine: Plan) -> None:
    """Store scores of all answers to rescore, lower the warmer they are."""
    warmth = {
        name_of(c): c.result.cell.temperature
        for c in split_scores(mine, mine.finished())[0]
    }
    for _, job in rescoring.todo():
        for cell in job.cells:
            means = [-1.0 - warmth[cell.label], -2.0 - warmth[cell.label]]
            result = measured(cell, 0.0, details={"mean_logprobs": means})
            rescoring.keep(job, 0, result)


def without_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave pictures out of reports: drawing them takes longer than the rest."""
    for name in ("line_panels", "bar_panels", "side_by_side"):
        monkeypatch.setattr(plot, name, lambda *args, **options: None)


def reported(folder: Path) -> str:
    """The report that the command makes of a folder's results.json."""
    done = CliRunner().invoke(app, ["report", str(folder)])
    assert done.exit_code == 0, done.output
    return (folder / "results.md").read_text()


def rendered(
    render: Callable[[dict[str, Any], Path], None],
    rows: list[Any],
    folder: Path,
    **more: Any,
) -> str:
    """The report of some rows; a figure stands beside it."""
    content = {
        "rows": [row.model_dump(mode="json") for row in rows],
        "provenance": {"commit": "abc"},
        **more,
    }
    render(content, folder)
    assert (folder / "results.png").stat().st_size > 0
    return (folder / "results.md").read_text()
