"""The kernel table: tree attention beside stock causal attention, on one card.

    python -m benchmarks.gpu.kernel --out DIR

docs/gpu.md says what is measured and how.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import track

from benchmarks import provenance
from benchmarks.gpu import kernel_report
from benchmarks.gpu.card import (
    NoCardError,
    copy_bandwidth,
    describe_card,
    event_times_ms,
    flush_buffer,
    origin,
    require_card,
    versions,
)
from benchmarks.gpu.cells import CellFolder, settings_of
from benchmarks.gpu.kernel_inputs import (
    Batch,
    Case,
    Paging,
    make_batch,
    relative_error,
)
from benchmarks.gpu.kernel_report import KernelCell
from benchmarks.gpu.kernel_sides import (
    CHAIN,
    SIDES,
    TREE,
    Call,
    MissingKernelError,
    make_side,
)
from benchmarks.gpu.shapes import CARD_SHAPES, known_shapes

MODULE = "benchmarks.gpu.kernel"
console = Console(stderr=True, soft_wrap=True)
WARM_UPS = 3
# Relative to the largest true value. float32 may go through TF32 where a kernel's
# products do; bfloat16 has 8 bits.
LIMITS = {"float32": 2e-3, "bfloat16": 3e-2}

Numbers = Annotated[str, typer.Option(help="Comma-separated.")]
Shapes = Annotated[str, typer.Option(help="Some of 8b, 70b-tp8.")]
Repeats = Annotated[int, typer.Option(min=1, help="Timed calls of each side.")]
Layout = Annotated[str, typer.Option(help="Of the KV cache: nhd or hnd.")]
PageSize = Annotated[int, typer.Option(min=1, help="Positions of a KV block.")]
MaxModelLen = Annotated[int, typer.Option(min=1, help="Width of block tables.")]
Commit = Annotated[str, typer.Option(help="To note, where git does not know it.")]
Out = Annotated[Path, typer.Option(help="For results; finished cells are kept.")]
Report = Annotated[
    bool, typer.Option("--report", help="Only write table and plots; needs no card.")
]
Smoke = Annotated[
    bool,
    typer.Option("--smoke", help="Check tiny cells on this machine, store nothing."),
]


@dataclass(frozen=True)
class Settings:
    """What is the same in all cells."""

    paging: Paging
    repeats: int
    commit: str | None
    settings: str
    device: str = "cuda"


def kernel(
    nodes: Numbers = "1,8,16,32,64",
    contexts: Numbers = "512,2048,8192,32768",
    batches: Numbers = "1,8,32",
    shapes: Shapes = CARD_SHAPES,
    repeats: Repeats = 30,
    page_size: PageSize = 16,
    layout: Layout = "nhd",
    max_model_len: MaxModelLen = 40960,
    commit: Commit = "",
    out: Out = Path("runs/gpu-kernel"),
    report: Report = False,
    smoke: Smoke = False,
) -> None:
    """Time tree attention against stock causal kernels: JSON, Markdown, plots."""
    try:
        paging = paging_of(page_size, layout, max_model_len)
        if smoke:
            check_tiny_cells(paging)
            return
        cases = [
            Case(shape, node, context, batch)
            for shape in known_shapes(shapes)
            for batch in numbers(batches, "--batches")
            for node in numbers(nodes, "--nodes")
            for context in numbers(contexts, "--contexts")
        ]
        if not report:
            require_card()
            measure(cases, paging, repeats, commit, out)
        write_reports(out, commit)
    except (NoCardError, ValueError) as error:
        console.print(f"kernel: {error}", markup=False)
        raise typer.Exit(1) from None


def numbers(text: str, option: str) -> list[int]:
    """Read a comma-separated list of numbers from 1 on."""
    try:
        found = [int(part) for part in text.split(",") if part.strip()]
    except ValueError:
        found = []
    if not found or min(found) < 1:
        raise ValueError(f"{option}: {text!r} is no list of numbers from 1 on")
    return found


def paging_of(page_size: int, layout: str, max_model_len: int) -> Paging:
    """Read `--page-size`, `--layout` and `--max-model-len`."""
    if layout not in ("nhd", "hnd"):
        raise ValueError(f"--layout is {layout!r}; write nhd or hnd")
    return Paging(page_size, layout, max_model_len)


def measure(
    cases: Sequence[Case], paging: Paging, repeats: int, commit: str, out: Path
) -> None:
    """Measure the cells that are not finished, each stored when it is done."""
    told = settings_of(describe_card(), versions(), paging, repeats)
    shared = Settings(paging, repeats, commit or provenance.commit(), told)
    folder = CellFolder(out, KernelCell, told)
    folder.read()
    missing = set(folder.missing(case.name for case in cases))
    todo = [case for case in cases if case.name in missing]
    console.print(f"{len(todo)} of {len(cases)} cells to do")
    if not todo:
        return
    bandwidth = copy_bandwidth()
    flush = flush_buffer()
    for case in track(todo, "cells", console=console):
        folder.add(measured(case, shared, bandwidth, flush))


def measured(
    case: Case, shared: Settings, bandwidth: float, flush: torch.Tensor
) -> KernelCell:
    """Check a cell, then time its sides in turn."""
    errors = {"float32": float32_errors(case, shared)}
    batch = make_batch(case, torch.bfloat16, shared.device, shared.paging)
    output = torch.empty_like(batch.query)
    calls, missing = make_sides(batch, output)
    errors["bfloat16"] = errors_of(calls, batch, output)
    wrong = [
        f"{dtype} {side} {error:.1e}"
        for dtype, by_side in errors.items()
        for side, error in by_side.items()
        if error > LIMITS[dtype]
    ]
    for _ in range(WARM_UPS):
        for call in calls.values():
            call()
    times = event_times_ms(list(calls.values()), shared.repeats, flush)
    return KernelCell(
        name=case.name,
        settings=shared.settings,
        commit=shared.commit,
        shape=case.shape,
        nodes=case.nodes,
        context=case.context,
        batch=case.batch,
        kv_bytes=batch.kv_bytes,
        copy_gb_per_s=bandwidth,
        ms={s: statistics.median(t) for s, t in zip(calls, times, strict=True)},
        best_ms={s: min(t) for s, t in zip(calls, times, strict=True)},
        errors=errors,
        wrong=wrong,
        missing=missing,
    )


def make_sides(
    batch: Batch, output: torch.Tensor
) -> tuple[dict[str, Call], dict[str, str]]:
    """Calls of the sides that are there, and why the others are not."""
    calls, missing = {}, {}
    for name in SIDES:
        try:
            calls[name] = make_side(name, batch, output)
        except MissingKernelError as error:
            missing[name] = str(error)
    return calls, missing


def errors_of(
    calls: dict[str, Call], batch: Batch, output: torch.Tensor
) -> dict[str, float]:
    """Call each side once and compare with float64."""
    errors = {}
    for name, call in calls.items():
        output.fill_(torch.nan)
        call()
        errors[name] = relative_error(batch, output, name == TREE)
    return errors


def float32_errors(case: Case, shared: Settings) -> dict[str, float]:
    """Errors of our kernel in float32, for at most two requests."""
    small = Case(case.shape, case.nodes, case.context, min(case.batch, 2))
    batch = make_batch(small, torch.float32, shared.device, shared.paging)
    output = torch.empty_like(batch.query)
    ours = {name: make_side(name, batch, output) for name in (TREE, CHAIN)}
    return errors_of(ours, batch, output)


def check_tiny_cells(paging: Paging) -> None:
    """Compare our kernel with float64 on tiny cells, also in Triton's interpreter."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        raise ValueError("--smoke without a card runs with TRITON_INTERPRET=1")
    shared = Settings(replace(paging, max_model_len=64), 1, None, "", device)
    for nodes, context, batch in ((1, 5, 1), (6, 40, 2), (17, 16, 3)):
        case = Case("tiny", nodes, context, batch)
        shown = float32_errors(case, shared)
        told = ", ".join(f"{name} {error:.1e}" for name, error in shown.items())
        console.print(f"{case.name}: relative errors {told}")
        if max(shown.values()) > LIMITS["float32"]:
            raise ValueError(f"{case.name}: the kernel disagrees with float64")


def write_reports(out: Path, commit: str) -> None:
    """Write results.json, results.md and a plot per shape from finished cells."""
    cells = CellFolder(out, KernelCell, None).read()
    if not cells:
        raise ValueError(f"{out} holds no finished cells")
    found: dict[str, Any] = origin(MODULE, commit)
    kernel_report.write(cells, found, out)
    console.print(f"wrote results.json, results.md and plots to {out}")


if __name__ == "__main__":
    typer.run(kernel)
