"""The kernel table: tree attention beside stock causal attention, on one card.

docs/dev/gpu.md says what is measured and how.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Generator, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import typer

from benchmarks.gpu import card, kernel_calls
from benchmarks.gpu.kernel_calls import CHAIN, FA3, SIDES, STOCK, TREE, Case
from benchmarks.gpu.step import CARD_SHAPES, SHAPES, Row
from benchmarks.harness import options, plan, plot, report
from vllm_treespec.tools.launch import Event
from vllm_treespec.tools.sides import Cell, CellResult, Job, Side

WARM_UPS = 3
# Relative to the largest true value. float32 may go through TF32 where a kernel's
# products do; bfloat16 has 8 bits.
LIMITS = {"float32": 2e-3, "bfloat16": 3e-2}
COLOURS = {TREE: "tab:red", CHAIN: "tab:orange", STOCK: "tab:blue", FA3: "tab:green"}
Repeats = Annotated[int, typer.Option(min=1, help="Timed calls of each side.")]
PageSize = Annotated[int, typer.Option(min=1, help="Positions of a KV block.")]
Layout = Annotated[Literal["nhd", "hnd"], typer.Option(help="Of the KV cache.")]
ModelLen = Annotated[int, typer.Option(min=1, help="Width of block tables.")]


def gpu_kernel(
    nodes: card.Numbers = "1,8,16,32,64",
    contexts: card.Numbers = "512,2048,8192,32768",
    batches: card.Numbers = "1,8,32",
    shapes: card.Shapes = CARD_SHAPES,
    repeats: Repeats = 30,
    page_size: PageSize = 16,
    layout: Layout = "nhd",
    max_model_len: ModelLen = 40960,
    commit: card.Commit = "",
    out: options.Out = Path("runs/gpu-kernel"),
    fresh: options.Fresh = False,
    smoke: card.Smoke = False,
) -> None:
    """Time tree attention against stock causal kernels, on a card."""
    with options.one_line_errors("gpu-kernel"):
        paging = {"page_size": page_size, "layout": layout}
        if smoke:
            check_tiny_cells(paging)
            return
        paging["max_model_len"] = max_model_len
        engines = [
            engine_of(shape, batch, nodes, contexts, paging)
            for shape in options.words(shapes, "--shapes", list(SHAPES))
            for batch in options.numbers(batches, "--batches", int, 1)
        ]
        card.require_card()
        deciding = [card.card_and_versions(), paging, repeats]
        job = plan.base_job("", [], 0)
        made = plan.make_plan(job, engines, out, deciding, fresh)
        origin = card.origin("gpu-kernel", commit)
        made = replace(made, commit=origin["commit"])
    measure = partial(plan.execute, start=partial(measure_cells, repeats))
    plan.run_plan(made, origin, contents, render, measure=measure)


def engine_of(
    shape: str, batch: int, nodes: str, contexts: str, paging: dict[str, Any]
) -> plan.Engine:
    """Plan the cells of a shape and batch size; a side stands for all kernels."""
    cells = [
        Cell(
            batch_size=batch,
            temperature=0.0,
            options={"shape": shape, "nodes": count, "context": context, **paging},
            label=f"n{count}-c{context}",
        )
        for count in options.numbers(nodes, "--nodes", int, 1)
        for context in options.numbers(contexts, "--contexts", int, 1)
    ]
    side = Side(name=f"{shape}-b{batch}", family="kernel", engine={})
    return plan.Engine(side, cells)


def measure_cells(repeats: int, job: Job, log: Path) -> Generator[Event]:
    """Measure cells in this process; there is no log."""
    copy = {"copy_gb_per_s": card.copy_bandwidth()}
    for cell in job.cells:
        case = Case(batch=cell.batch_size, **cell.options)
        name = {"name": f"{job.side.name}-{cell.name}"}
        row = name | asdict(case) | copy | measure(case, repeats)
        result = CellResult(
            cell=cell, seconds=0, num_tokens=[], tpot_ms=[], token_ids=[], details=row
        )
        yield {"event": "cell", "result": result.model_dump(mode="json")}


def measure(case: Case, repeats: int) -> Row:
    """Check a cell, then time its sides in turn."""
    errors = {"float32": float32_errors(case, "cuda")}
    batch = kernel_calls.make_batch(case, torch.bfloat16, "cuda")
    output = torch.empty_like(batch.query)
    stock, missing = kernel_calls.stock_calls(batch, output)
    calls = kernel_calls.our_calls(batch, output) | stock
    errors["bfloat16"] = errors_of(calls, batch, output)
    card.event_times_ms(list(calls.values()), WARM_UPS)
    times = card.event_times_ms(list(calls.values()), repeats)
    by_side = list(zip(calls, times, strict=True))
    return {
        # keys and values that have to be read once
        "kv_bytes": batch.kv_bytes,
        # by side, microseconds
        "us": {side: 1000 * statistics.median(ms) for side, ms in by_side},
        "best_us": {side: 1000 * min(ms) for side, ms in by_side},
        # by dtype and side, relative to the largest true value
        "errors": errors,
        # sides whose error is above what their dtype explains
        "wrong": [
            f"{dtype} {side} {error:.1e}"
            for dtype, of_sides in errors.items()
            for side, error in of_sides.items()
            if error > LIMITS[dtype]
        ],
        # sides that this machine does not have, and why
        "missing": missing,
    }


def errors_of(
    calls: dict[str, kernel_calls.Call], batch: kernel_calls.Batch, output: torch.Tensor
) -> dict[str, float]:
    """Call each side once and compare with float64."""
    errors = {}
    for name, call in calls.items():
        output.fill_(torch.nan)
        call()
        errors[name] = kernel_calls.relative_error(batch, output, name == TREE)
    return errors


def float32_errors(case: Case, device: str) -> dict[str, float]:
    """Errors of our kernel in float32, for at most two requests."""
    small = replace(case, batch=min(case.batch, 2))
    batch = kernel_calls.make_batch(small, torch.float32, device)
    output = torch.empty_like(batch.query)
    return errors_of(kernel_calls.our_calls(batch, output), batch, output)


def check_tiny_cells(paging: dict[str, Any]) -> None:
    """Compare our kernel with float64 on tiny cells, also in Triton's interpreter."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        raise ValueError("--smoke without a card runs with TRITON_INTERPRET=1")
    for nodes, context, batch in ((1, 5, 1), (6, 40, 2), (17, 16, 3)):
        case = Case("tiny", nodes, context, batch, max_model_len=64, **paging)
        errors = float32_errors(case, device)
        shown = ", ".join(f"{name} {error:.1e}" for name, error in errors.items())
        options.console.print(f"{case}: relative errors {shown}", markup=False)
        if max(errors.values()) > LIMITS["float32"]:
            raise ValueError(f"{case}: the kernel disagrees with float64")


def contents(finished: Sequence[plan.StoredCell]) -> report.Content:
    """Put the cells into the order of the tables; add ratios and bandwidth."""
    rows = []
    for cell in finished:
        row = cell.result.details
        ours = row["us"][TREE]
        gb_per_s = row["kv_bytes"] / ours / 1e3
        more = {
            "over": {side: ours / us for side, us in row["us"].items()},
            "gb_per_s": gb_per_s,
            "percent_of_copy": 100 * gb_per_s / row["copy_gb_per_s"],
        }
        rows.append(row | more)
    keys = ("shape", "batch", "nodes", "context")
    return {"cells": sorted(rows, key=lambda row: [row[key] for key in keys])}


COLUMNS: report.Columns = {
    "nodes": "{nodes}",
    "context": "{context}",
    **{f"{side} µs": f"{{us[{side}]:.1f}}" for side in SIDES},
    "tree / stock": f"{{over[{STOCK}]:.2f}}×",
    "tree / fa3": f"{{over[{FA3}]:.2f}}×",
    "tree / chain": f"{{over[{CHAIN}]:.2f}}×",
    "tree GB/s": "{gb_per_s:.0f}",
    "of copy": "{percent_of_copy:.0f} %",
    "float32 error": f"{{errors[float32][{TREE}]:.0e}}",
    "bfloat16 error": f"{{errors[bfloat16][{TREE}]:.0e}}",
}


def render(content: report.Content, out: Path) -> None:
    """Write one table per shape and batch, one plot per shape."""
    rows, parts = content["cells"], []
    for shape, batch in dict.fromkeys((row["shape"], row["batch"]) for row in rows):
        here = [r for r in rows if (r["shape"], r["batch"]) == (shape, batch)]
        table = report.table_of(here, COLUMNS)
        parts += [f"## {shape}, batch {batch}", table, f"![]({shape}.png)"]
    missing = {side: why for row in rows for side, why in row["missing"].items()}
    wrong = {row["name"]: ", ".join(row["wrong"]) for row in rows if row["wrong"]}
    for title, entries in {"Missing": missing, "Wrong results": wrong}.items():
        parts += [f"## {title}", report.listing(entries)] if entries else []
    report.write_markdown(out, "Attention kernel", parts, content)
    facets: Any = {"hue": "side", "col": "nodes", "row": "batch", "palette": COLOURS}
    for shape in dict.fromkeys(row["shape"] for row in rows):
        points = [
            {**row, "side": side, "µs": us}
            for row in rows
            for side, us in row["us"].items()
            if row["shape"] == shape
        ]
        picture = out / f"{shape}.png"
        plot.line_panels(points, picture, x="context", y="µs", log_x=True, **facets)
