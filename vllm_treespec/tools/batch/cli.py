"""The command ``treespec batch``."""

from __future__ import annotations

import json
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vllm_treespec.tools.options import json_object

if TYPE_CHECKING:
    import rich.progress
    from rich.console import Console

    from vllm_treespec.tools.batch.run import Answerer, Progress, Settings, Summary

# Options of vLLM that change speed and memory only: a later start may have others.
FREE = {
    "distributed-executor-backend",
    "download-dir",
    "enforce-eager",
    "gpu-memory-utilization",
    "kv-cache-memory-bytes",
    "load-format",
    "max-num-batched-tokens",
    "max-num-seqs",
    "num-gpu-blocks-override",
    "tensor-parallel-size",
}
# Where output is no terminal, seconds between two lines.
QUIET_S = 30.0


def batch(
    context: typer.Context,
    input_file: Annotated[
        Path,
        typer.Argument(metavar="INPUT", help="JSONL or Parquet; see docs/commands.md."),
    ],
    output: Annotated[
        Path, typer.Argument(metavar="OUTPUT", help="JSONL or Parquet; a new file.")
    ],
    model: Annotated[str, typer.Option(help="The target: folder or hub id.")],
    speculative_config: Annotated[
        str | None,
        typer.Option(
            metavar="JSON|FILE", help="As of vllm serve; without it, plain vLLM."
        ),
    ] = None,
    sampling_params: Annotated[
        str,
        typer.Option(metavar="JSON", help="Of rows that say nothing else."),
    ] = "{}",
    chat: Annotated[
        bool, typer.Option("--chat", help="Each prompt is a user's message.")
    ] = False,
    prompt_column: Annotated[str, typer.Option(help="Holds the prompt.")] = "prompt",
    id_column: Annotated[str, typer.Option(help="Holds the row's id.")] = "id",
    limit: Annotated[
        int | None, typer.Option(min=1, help="Answer the first so many rows only.")
    ] = None,
    ray: Annotated[
        int | None,
        typer.Option(min=1, metavar="ENGINES", help="Run so many engines over Ray."),
    ] = None,
) -> None:
    """Answer each row of a file exactly once; run it again after a kill.

    Write INPUT and OUTPUT first. Options that are not listed here go to vLLM, as of
    `vllm serve`: --max-model-len 4096.
    """
    from rich.console import Console

    from vllm_treespec.config import names_our_method, parse_spec_config, read_spec
    from vllm_treespec.config.checks import check_head_files
    from vllm_treespec.engine.refusals import refuse_missing
    from vllm_treespec.tools.batch import engine, ray_data
    from vllm_treespec.tools.batch.rows import Columns
    from vllm_treespec.tools.batch.run import Settings

    signal.signal(signal.SIGTERM, _stop)
    console = Console(stderr=True, soft_wrap=True, highlight=False)
    try:
        check_places(input_file, output)
        if ray is None:
            # engines over Ray may have folders that are not here
            refuse_missing(model)
        arguments = ["--model", model]
        spec, config = None, None
        if speculative_config is not None:
            spec = read_spec(speculative_config)
            arguments += ["--speculative-config", json.dumps(spec)]
        if spec is not None and names_our_method(spec):
            config = parse_spec_config(spec)
            check_head_files(config)
        sampling = json_object(sampling_params, "--sampling-params")
        others = vllm_options(context.args)
        arguments += context.args
        settings = Settings(
            input=input_file,
            output=output,
            options={
                "--model": model,
                "--speculative-config": spec,
                "--sampling-params": sampling,
                "--chat": chat,
                "--prompt-column": prompt_column,
                "--id-column": id_column,
                **{f"--{k}": v for k, v in others.items() if k not in FREE},
            },
            columns=Columns(prompt=prompt_column, id=id_column),
            limit=limit,
        )
        answer: Answerer
        if ray is None:
            answer = engine.VllmAnswerer(arguments, sampling, chat)
        else:
            engines = ray_data.engines_of(ray, others)
            answer = ray_data.RayAnswerer(arguments, sampling, chat, engines, config)
        show_batch(console, settings, answer)
    except KeyboardInterrupt:
        console.print("stopped; the same command goes on", markup=False)
        raise typer.Exit(130) from None
    except (OSError, RuntimeError, ValueError) as error:
        message = " ".join(str(error).split())
        typer.echo(f"treespec batch: {message}", err=True)
        raise typer.Exit(1) from None


def _stop(number: int, frame: object) -> None:
    """On SIGTERM, end as other programs do."""
    sys.exit(128 + number)


def check_places(input_file: Path, output: Path) -> None:
    """Refuse options in the places of INPUT and OUTPUT, and an INPUT that is not there.

    Raises:
        BatchError: naming the remedy.

    """
    from vllm_treespec.tools.batch.rows import BatchError

    for name in (str(input_file), str(output)):
        if name.startswith("-"):
            raise BatchError(
                f"{name} stands where a file should; write INPUT and OUTPUT first, "
                f"then the options"
            )
    if not input_file.is_file():
        raise BatchError(f"INPUT {input_file}: there is no such file")
    if input_file.resolve() == output.resolve():
        raise BatchError("INPUT and OUTPUT are one file; name another OUTPUT")


def vllm_options(arguments: Sequence[str]) -> dict[str, str]:
    """Options by name, to compare them with those of an earlier start.

    Raises:
        BatchError: a value without an option, such as a third file.

    """
    from vllm_treespec.tools.batch.rows import BatchError

    found: dict[str, str] = {}
    name = ""
    for argument in arguments:
        if argument.startswith("--"):
            name, _, value = argument.removeprefix("--").partition("=")
            name = name.replace("_", "-")
            found[name] = value
        elif name:
            found[name] = f"{found[name]} {argument}".strip()
        else:
            raise BatchError(
                f"{argument!r} belongs to no option; write INPUT and OUTPUT first, "
                f"then the options by their long names"
            )
    return found


def show_batch(console: Console, settings: Settings, answer: Any) -> None:
    """Run a batch with a bar; on no terminal, with a line now and then."""
    from vllm_treespec.tools.batch.run import run_batch

    show = Show(console)
    with show.bar:
        summary = run_batch(settings, answer, show)
    console.print(result(settings, summary), markup=False)


def result(settings: Settings, summary: Summary) -> str:
    """Say in a line or two what a batch came to."""
    text = f"rows answered: {summary.answered}, in {settings.output}"
    if summary.bad:
        text += f"\nbad rows: {summary.bad}, with reasons, in {settings.bad_rows}"
        if not settings.bad_rows.exists():
            text += ", which is gone"
    return text


class Show:
    """Shows how far a batch is."""

    def __init__(self, console: Console) -> None:
        """Make the bar."""
        self.console = console
        self.bar = progress_bar(console)
        self.task: rich.progress.TaskID | None = None
        self.first_tokens: tuple[float, int] | None = None
        self.last_line = time.monotonic()

    def __call__(self, progress: Progress) -> None:
        """Show it."""
        note = f"{progress.bad} bad, {self.speed(progress.tokens):.0f} tokens/s"
        if self.task is None:
            self.task = self.bar.add_task("", total=progress.total, note=note)
        self.bar.update(
            self.task, total=progress.total, completed=progress.finished, note=note
        )
        now = time.monotonic()
        if not self.console.is_terminal and now - self.last_line > QUIET_S:
            self.last_line = now
            rows = f"{progress.finished} of {progress.total} rows"
            self.console.print(f"{rows}, {note}", markup=False)

    def speed(self, tokens: int) -> float:
        """Tokens per second since the first rows of this process were finished."""
        now = time.monotonic()
        if self.first_tokens is None:
            if tokens:
                self.first_tokens = now, tokens
            return 0.0
        start, first = self.first_tokens
        return (tokens - first) / max(now - start, 1e-9)


def progress_bar(console: Console) -> rich.progress.Progress:
    """Make the bar: rows, tokens per second, times."""
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    return Progress(
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("rows, {task.fields[note]}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=console,
        disable=not console.is_terminal,
    )
