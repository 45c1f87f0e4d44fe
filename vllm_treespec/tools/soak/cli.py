"""The command ``treespec soak``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.progress import Progress
    from rich.table import Table

    from vllm_treespec.tools.soak.run import Report

# at any batch size: else nothing drafts while many requests run
DEFAULT_TREE = {
    "method": "rsd_s",
    "beam_width": 3,
    "depth": 3,
    "schedule": "fixed",
}
SHOWN = 10
ANSWERS = {True: "yes", False: "NO", None: "run too short to tell"}


def soak(
    requests: Annotated[int, typer.Option(min=1, help="How many.")] = 2000,
    seed: Annotated[int, typer.Option(help="Other requests for another one.")] = 0,
    spec: Annotated[
        str | None,
        typer.Option(
            metavar="JSON|FILE",
            help="A spec-config; without one, rsd_s 3x3 with the shipped draft model.",
        ),
    ] = None,
    target: Annotated[
        str | None, typer.Option(metavar="MODEL", help="The target: folder or hub id.")
    ] = None,
    max_num_seqs: Annotated[int, typer.Option(min=1, help="Running at once.")] = 16,
    kv_blocks: Annotated[
        int, typer.Option(min=12, help="Of 32 tokens; few, so that requests preempt.")
    ] = 32,
    out: Annotated[
        Path, typer.Option(help="Runs, logs and soak.json go here.", file_okay=False)
    ] = Path("runs/soak"),
) -> None:
    """Send random requests through plain vLLM and trees, in float32, and check."""
    from rich.console import Console

    from vllm_treespec.config import (
        SpecConfigError,
        parse_spec_config,
        read_spec,
    )
    from vllm_treespec.config.checks import check_head_files
    from vllm_treespec.tools.assets import AssetError, ensure_target, shipped_drafter
    from vllm_treespec.tools.load import check_model
    from vllm_treespec.tools.prompts import SHIPPED, load_prompts
    from vllm_treespec.tools.soak import run
    from vllm_treespec.tools.soak.requests import make_requests

    console = Console(soft_wrap=True)
    try:
        if spec is None:
            method: dict[str, Any] = {**DEFAULT_TREE, "model": shipped_drafter()}
        else:
            method = read_spec(spec)
        check_head_files(parse_spec_config(method))
        settings = run.Settings(
            target=target or str(ensure_target()),
            spec=method,
            requests=requests,
            seed=seed,
            max_num_seqs=max_num_seqs,
            kv_blocks=kv_blocks,
        )
        check_model("--target", settings.target)
        length = settings.max_model_len
        material = run.material(settings.target, load_prompts(SHIPPED), length)
        sent = make_requests(requests, seed, material, length)
        out.mkdir(parents=True, exist_ok=True)
        with progress(console) as bar:
            report = run.soak(settings, sent, out, Show(bar))
    except (AssetError, SpecConfigError, run.SoakError) as error:
        typer.echo(f"treespec soak: {error}", err=True)
        raise typer.Exit(1) from None
    for line in problem_lines(report):
        console.print(line, markup=False, highlight=False)
    console.print(summary(report))
    console.print(checks(report))
    console.print(f"{'passed' if report.passed else 'FAILED'}: {out / 'soak.json'}")
    if not report.passed:
        raise typer.Exit(1)


def progress(console: Any) -> Progress:
    """Make the bars, one for each engine."""
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
    )

    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("requests, {task.fields[note]}"),
        TimeElapsedColumn(),
        console=console,
    )


class Show:
    """Shows events on bars."""

    def __init__(self, bar: Progress) -> None:
        """Remember the bars."""
        self.bar = bar
        self.tasks: dict[str, Any] = {}

    def __call__(self, side: str, event: dict[str, Any]) -> None:
        """Show one event of a side."""
        if side not in self.tasks:
            self.tasks[side] = self.bar.add_task(side, total=None, note="starting")
        task = self.tasks[side]
        if event["event"] == "started":
            self.bar.update(task, total=event["requests"], note="running")
        elif event["event"] == "answer":
            self.bar.advance(task)
        elif event["event"] == "progress":
            note = f"{len(event['in_flight'])} in flight, step {event['steps']}"
            self.bar.update(task, note=note)
        elif event["event"] == "end":
            self.bar.update(task, note=f"{event['end']['steps']} steps")
        elif event["event"] == "kept":
            self.bar.update(task, note="kept from before")
            self.bar.stop_task(task)


def problem_lines(report: Report) -> list[str]:
    """List ties and problems, the first of each."""
    lines = [
        f"tie: {tie.request}, {tie.detail}: {tie.trees}, plain {tie.plain} "
        f"(gap {tie.gap:.6f})"
        for tie in report.ties[:SHOWN]
    ]
    lines += [
        f"{problem.check}: NO, {problem.side}"
        f"{', ' + problem.request if problem.request else ''}: {problem.detail}"
        for problem in report.problems[:SHOWN]
    ]
    more = len(report.problems) - SHOWN
    return [*lines, f"and {more} more problems"] if more > 0 else lines


def summary(report: Report) -> Table:
    """Make the table of both engines' numbers."""
    from rich.table import Table

    settings = report.settings
    title = (
        f"{settings.requests} requests, seed {settings.seed}, float32, "
        f"{settings.kv_blocks} KV blocks, {settings.spec['method']}"
    )
    table = Table("", title=title)
    for side in ("plain", "trees"):
        table.add_column(side, justify="right")
    sides = (report.plain, report.trees)
    rows: dict[str, list[str]] = {
        "requests answered": [f"{side.requests}" for side in sides],
        "of them aborted": [f"{side.aborted}" for side in sides],
        "tokens": [f"{side.tokens}" for side in sides],
        "seconds": [f"{side.end.seconds:.0f}" for side in sides],
        "requests/s": [f"{side.requests / side.end.seconds:.2f}" for side in sides],
        "engine steps": [f"{side.end.steps}" for side in sides],
        "preemptions": [f"{side.end.preemptions}" for side in sides],
        "prompt tokens from the prefix cache": [
            f"{side.end.prefix_hits / max(side.end.prefix_queries, 1):.0%}"
            for side in sides
        ],
        "trees verified": [
            "–" if side.end.trees is None else f"{side.end.trees}" for side in sides
        ],
        "acceptance length": [optional(side.end.acceptance_length) for side in sides],
        "memory growth, second half, MiB": [
            optional(side.memory_growth_mib) for side in sides
        ],
    }
    for name, cells in rows.items():
        table.add_row(name, *cells)
    return table


def optional(value: float | None) -> str:
    """A number, or a dash."""
    return "–" if value is None else f"{value:.2f}"


def checks(report: Report) -> Table:
    """Make the table of checks."""
    from rich.table import Table

    table = Table("check", "")
    for name, holds in report.checks.items():
        table.add_row(name, ANSWERS[holds])
    greedy, sampled = report.greedy_compared, report.sampled_compared
    compared = f"{greedy} greedy and {sampled} sampled requests compared; ties"
    table.add_row(compared, str(len(report.ties)))
    return table
