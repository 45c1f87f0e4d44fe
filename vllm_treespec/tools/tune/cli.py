"""The command ``treespec tune``."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vllm_treespec.tools.options import numbers

if TYPE_CHECKING:
    from rich.console import Console

    from vllm_treespec.tools.sides import Cell


def tune(
    target: Annotated[str, typer.Argument(help="Target model: folder or hub id.")],
    draft: Annotated[
        list[str] | None, typer.Option(help="Draft model for it. May be repeated.")
    ] = None,
    head: Annotated[
        list[str] | None, typer.Option(help="Head for it. May be repeated.")
    ] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(
            help="Your prompts, JSONL; `workload` in a line tells kinds of work apart. "
            "Default: some of chat, code and editing."
        ),
    ] = None,
    num_prompts: Annotated[
        int, typer.Option(min=1, help="Of each kind of work, at even distances.")
    ] = 4,
    max_tokens: Annotated[int, typer.Option(min=2, help="Per answer.")] = 64,
    batch_sizes: Annotated[
        str, typer.Option(help="Requests at a time, comma-separated.")
    ] = "1,4",
    temperatures: Annotated[str, typer.Option(help="Comma-separated.")] = "0,1",
    minutes: Annotated[
        float, typer.Option(min=0, help="No engine starts after so many.")
    ] = 30.0,
    eager: Annotated[
        bool, typer.Option("--eager", help="Do not compile: start faster, run slower.")
    ] = False,
    dtype: Annotated[str, typer.Option(help="Of the target, as of vllm serve.")] = (
        "bfloat16"
    ),
    max_model_len: Annotated[int, typer.Option(min=16, help="As of vllm serve.")] = (
        2048
    ),
    out: Annotated[
        Path, typer.Option(help="Results; what is there is not measured again.")
    ] = Path("tune"),
) -> None:
    """Try methods and trees on your own prompts; write the fastest spec-config.

    Run it again to go on after a cut, or with more --minutes.
    """
    from rich.console import Console

    from vllm_treespec.config import parse_spec_config
    from vllm_treespec.config.checks import check_weights
    from vllm_treespec.tools.launch import EngineError
    from vllm_treespec.tools.load import check_model
    from vllm_treespec.tools.prompts import SHIPPED_WORKLOADS
    from vllm_treespec.tools.sides import Job, Side, side_events
    from vllm_treespec.tools.tune import report
    from vllm_treespec.tools.tune.candidates import candidates
    from vllm_treespec.tools.tune.choose import choose
    from vllm_treespec.tools.tune.search import Search, compared

    console = Console(stderr=True, soft_wrap=True, highlight=False)
    try:
        work = workloads_of(prompts or SHIPPED_WORKLOADS, num_prompts)
        loads = loads_of(list(work), batch_sizes, temperatures)
        check_model("TARGET", target)
        for model in draft or []:
            check_model("--draft", model)
            check_weights(parse_spec_config({"method": "rsd_s", "model": model}))
        sides, specs = candidates(draft or [], head or [], eager)
        job = Job(
            side=Side(name="", family="", engine={}),
            target=target,
            prompts=[],
            workloads=work,
            cells=[],
            max_tokens=max_tokens,
            dtype=dtype,
            max_model_len=max_model_len,
            model_defaults=True,
        )
        with bar_of(console, minutes) as show:
            search = Search(
                job, sides, loads, out, 60 * minutes, versions(), show, side_events
            )
            rows = search.run()
    except (EngineError, OSError, ValueError) as error:
        typer.echo(f"treespec tune: {error}", err=True)
        raise typer.Exit(1) from None
    for name, reason in search.failed.items():
        console.print(f"left out: {name}: {reason}", markup=False)
    if not compared(rows):
        typer.echo("treespec tune: nothing was measured beside plain vLLM", err=True)
        raise typer.Exit(1)
    choice = choose(rows, specs)
    report.write_files(out, rows, choice, search.failed)
    for table in report.tables(rows):
        Console().print(table)
    for line in report.sentences(rows, choice):
        typer.echo(line)
    if choice.spec is not None:
        typer.echo(f"{out / 'spec.json'}:")
        typer.echo(json.dumps(choice.spec))


def versions() -> dict[str, str]:
    """What decides speeds besides the settings: a change of it is noticed."""
    import platform
    from importlib.metadata import version

    names = ("torch", "vllm", "vllm-treespec")
    return {"machine": platform.node(), **{name: version(name) for name in names}}


def workloads_of(path: Path, num_prompts: int) -> dict[str, list[str]]:
    """Prompts by kind of work; of a file that names none, all are one kind.

    Raises:
        PromptError: a line holds no prompt.

    """
    from vllm_treespec.tools.prompts import (
        load_prompts,
        load_workloads,
        names_workloads,
        spread,
    )

    if names_workloads(path):
        found = load_workloads(path)
    else:
        found = {path.name.partition(".")[0]: load_prompts(path)}
    return {name: spread(prompts, num_prompts) for name, prompts in found.items()}


def loads_of(work: list[str], batch_sizes: str, temperatures: str) -> list[Cell]:
    """Every kind of work at every batch size and temperature.

    Raises:
        ValueError: naming the option that holds no list of numbers.

    """
    from vllm_treespec.tools.sides import Cell

    return [
        Cell(batch_size=size, temperature=temperature, workload=name)
        for size in sorted(set(numbers(batch_sizes, "--batch-sizes", int, 1)))
        for temperature in numbers(temperatures, "--temperatures", float, 0)
        for name in work
    ]


@contextmanager
def bar_of(console: Console, minutes: float) -> Iterator[Callable[[float, str], None]]:
    """Show a bar of the time, with what is measured; yields what moves it."""
    from rich import progress

    columns = (
        progress.TextColumn("{task.description}"),
        progress.BarColumn(),
        progress.TextColumn("{task.completed:.0f} of {task.total:.0f} min"),
    )
    with progress.Progress(*columns, console=console) as bar:
        task = bar.add_task("", total=minutes)

        def show(seconds: float, said: str) -> None:
            bar.update(task, completed=seconds / 60, description=said)

        yield show
