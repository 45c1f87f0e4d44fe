"""The demo: a real model, plain and with draft trees, in one table."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.status import Status
from rich.table import Table

from vllm_treespec.assets import AssetError, ensure_target
from vllm_treespec.compare import (
    REDRAFTER,
    Cell,
    CompareError,
    Job,
    Row,
    Side,
    SideResult,
    plain_side,
    run_side,
    shipped_drafter,
    summarise,
    tree_side,
    with_speedups,
)
from vllm_treespec.prompts import SHIPPED, load_prompts

# Small trees: with a small target, every draft step must earn its time.
TREES: tuple[dict[str, Any], ...] = (
    {"method": "sd", "depth": 3},
    {"method": "rsd_c", "branching_factors": [2, 1, 1]},
    {"method": "rsd_s", "beam_width": 2, "depth": 3},
    {"method": "redrafter", "beam_width": 3, "length": 3, "num_drafts": 6},
)
NUM_PROMPTS = 4
SPEED_TOKENS = 64
SPEED_CELLS = [Cell(batch_size=1, temperature=t) for t in (0.0, 1.0)]
EXACT_TOKENS = 32
EXACT_CELLS = [Cell(batch_size=1, temperature=0.0)]


def main(
    target: str | None = None,
    draft: str | None = None,
    head: str | None = None,
    prompts: Path = SHIPPED,
) -> None:
    """Generate with and without draft trees and print the table.

    Args:
        target: folder of the target model; None gets SmolLM2-135M-Instruct.
        draft: folder of a draft model for it; None takes the shipped one.
        head: folder of a ReDrafter head for it; None takes the shipped one.
        prompts: JSONL whose first prompts are answered.

    Exits with status 1 when a model is missing or an engine fails.

    """
    console = Console(soft_wrap=True)
    try:
        target = target or str(ensure_target())
        draft = draft or shipped_drafter()
        head = head or shipped_drafter(REDRAFTER)
    except AssetError as error:
        raise SystemExit(f"treespec demo: {error}") from None
    sides = [plain_side("plain", eager=True)]
    models = {"redrafter": head}
    sides += [
        tree_side({**spec, "model": models.get(spec["method"], draft)}, eager=True)
        for spec in TREES
    ]
    questions = load_prompts(prompts)[:NUM_PROMPTS]
    console.print(
        f"{Path(target).name} on vLLM, {len(questions)} prompts: speed in bfloat16, "
        "then equality with plain vLLM in float32; 10 engine starts, a few minutes"
    )
    demo = Demo(console, target, questions)
    speed = demo.run(sides, SPEED_CELLS, SPEED_TOKENS, "bfloat16", stream=sides[-1])
    exact = demo.run(sides, EXACT_CELLS, EXACT_TOKENS, "float32")
    console.print(result_table(sides, speed, exact))
    console.print(
        f"Greedy text: answers of up to {EXACT_TOKENS} tokens that equal plain vLLM's "
        "token for token, in float32. In bfloat16 the number of rows in a forward "
        "changes rounding, so greedy text may drift there, in stock vLLM too. "
        "benchmarks/ compares with compiled vLLM and other trees."
    )
    if demo.failed:
        raise SystemExit(1)


class Demo:
    """Runs sides one after the other and shows what is going on."""

    def __init__(self, console: Console, target: str, prompts: list[str]) -> None:
        """Remember the models and prompts of all runs."""
        self.console = console
        self.target = target
        self.prompts = prompts
        self.failed = False
        self.streaming = False

    def run(
        self,
        sides: Sequence[Side],
        cells: list[Cell],
        max_tokens: int,
        dtype: str,
        stream: Side | None = None,
    ) -> dict[str, SideResult]:
        """Run the sides in turn; results by name, without those that failed."""
        results = {}
        for side in sides:
            job = Job(
                side=side,
                target=self.target,
                prompts=self.prompts,
                cells=cells,
                max_tokens=max_tokens,
                dtype=dtype,
                stream=self.prompts[0] if side is stream else None,
            )
            try:
                results[side.name] = self.run_one(job)
            except CompareError as error:
                self.failed = True
                self.console.print(f"failed: {error}", style="red", markup=False)
        return results

    def run_one(self, job: Job) -> SideResult:
        """Run one side under a status line; its streamed answer goes below it."""
        name = f"{job.side.name}, {job.dtype}"
        with (
            tempfile.TemporaryDirectory() as folder,
            self.console.status(f"{name}: starting the engine") as status,
        ):
            log = Path(folder) / "engine.log"
            result = run_side(job, log, lambda event: self.show(event, status, job))
        self.console.print(f"{name}: done, engine start {result.start_seconds:.0f} s")
        return result

    def show(self, event: dict[str, Any], status: Status, job: Job) -> None:
        """Show an event of the running side."""
        name = job.side.name
        if event["event"] == "started":
            status.update(f"{name}: generating")
        elif event["event"] == "text":
            if not self.streaming:
                self.streaming = True
                status.stop()
                self.console.print(f"{name} answers: {job.stream}", style="bold")
            self.console.print(event["text"], end="", markup=False, highlight=False)
        elif event["event"] == "done" and self.streaming:
            self.streaming = False
            self.console.print()


def result_table(
    sides: Sequence[Side], speed: dict[str, SideResult], exact: dict[str, SideResult]
) -> Table:
    """Make the demo's table; sides that failed are missing from it."""
    rows = with_speedups(
        [
            summarise(side, [cell])
            for side in sides
            if side.name in speed
            for cell in speed[side.name].cells
        ]
    )
    rows.sort(key=lambda row: row.cell.temperature)
    table = Table(title="draft trees on stock vLLM, batch 1, bfloat16, temperature T")
    table.add_column("method")
    for heading in ("T", "tokens/s", "speed-up", "acceptance\nlength", "nodes"):
        table.add_column(heading, justify="right")
    table.add_column("greedy text\nidentical", justify="right")
    for row in rows:
        table.add_row(*row_cells(row), identical(row.side, sides[0].name, exact))
    return table


def row_cells(row: Row) -> list[str]:
    """Columns of a row but the last."""
    return [
        row.side,
        f"{row.cell.temperature:g}",
        f"{row.tokens_per_s:.1f}",
        "–" if row.speedup is None else f"{row.speedup:.2f}×",
        "–" if row.acceptance_length is None else f"{row.acceptance_length:.2f}",
        "–" if row.mean_nodes is None else f"{row.mean_nodes:.1f}",
    ]


def identical(name: str, plain: str, exact: dict[str, SideResult]) -> str:
    """Count the float32 answers that equal plain vLLM's."""
    if name == plain or not {name, plain} <= exact.keys():
        return "–"
    ours = exact[name].cells[0].token_ids
    theirs = exact[plain].cells[0].token_ids
    same = sum(a == b for a, b in zip(ours, theirs, strict=True))
    return f"{same} of {len(theirs)}"
