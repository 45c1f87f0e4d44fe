"""The commands of ``treespec train``: one for each kind, and ``evaluate``."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import MISSING, fields
from inspect import Parameter, Signature
from pathlib import Path
from typing import Annotated, Any, cast

import typer
from rich.console import Console
from rich.table import Table

from vllm_treespec.train.kinds import KINDS, Kind
from vllm_treespec.train.options import OPTIONS, RunOptions

app = typer.Typer(
    name="train",
    help="Train what a target model drafts with.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def train_command(kind: Kind) -> Callable[..., None]:
    """Make the command that trains one kind, from the fields of its options."""
    parts = (kind.run, kind.shape, kind.options)

    def train(**given: Any) -> None:
        run, shape, options = (_made_of(part, given) for part in parts)
        check_paths([*(run.prompts or []), *(run.text or [])])
        shape.check(options)
        # Torch and transformers take seconds to import; --help should not wait.
        from vllm_treespec.train.pipeline import train_drafter

        with one_line_errors(kind.name):
            record = train_drafter(kind, run, shape, options)
        echo_result(run.out, record["result"])

    parameters = [parameter for part in parts for parameter in _parameters(part)]
    train.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    return train


def _parameters(part: Any) -> Iterator[Parameter]:
    """What typer makes options of: the fields of a dataclass that ``OPTIONS`` has."""
    for field in fields(part):
        if field.name in OPTIONS:
            default = Parameter.empty if field.default is MISSING else field.default
            said = cast(Any, Annotated)[field.type, OPTIONS[field.name]]
            kind = Parameter.KEYWORD_ONLY
            yield Parameter(field.name, kind, default=default, annotation=said)


def _made_of(part: Any, given: dict[str, Any]) -> Any:
    names = (field.name for field in fields(part))
    return part(**{name: given[name] for name in names if name in given})


for each in KINDS.values():
    about = f"Train {each.noun} for TARGET on its own text; run again to resume."
    app.command(each.name, help=about)(train_command(each))


@app.command()
def evaluate(
    head: Annotated[Path, typer.Argument(help="Folder of a head.")],
    target: Annotated[str, OPTIONS["target"]],
    text: Annotated[list[Path], typer.Option(help="The target's text; repeatable.")],
    work: Annotated[Path, typer.Option(help="Folder for hidden states.")],
    json_file: Annotated[
        Path | None, typer.Option("--json", help="File for these figures.")
    ] = None,
    seq_len: Annotated[int, OPTIONS["seq_len"]] = 512,
    top_k: Annotated[int, OPTIONS["top_k"]] = 64,
) -> None:
    """Measure a head, by level: is its guess the target's likeliest token?

    The levels of an EAGLE or Lyanna head follow its own drafts, of the text's tokens;
    those of a one-pass head are of blocks at a share of the text's positions.
    """
    check_paths(text)
    from vllm_treespec.train.pipeline import evaluate_head

    with one_line_errors("evaluate"):
        run = RunOptions(
            target, head, text=text, work=work, seq_len=seq_len, top_k=top_k
        )
        found = evaluate_head(run)
    if json_file is not None:
        record = {"text": [path.name for path in text], **found}
        json_file.write_text(json.dumps(record) + "\n", encoding="utf-8")
    table = Table(title=str(head))
    ranks = [1, 2, 4, 8]
    for heading in ("token", *(f"top-{k}" for k in ranks), "acceptance at T = 1"):
        table.add_column(heading, justify="right")
    levels = zip(found["accuracies"], found["acceptance"], strict=True)
    for level, (accuracies, acceptance) in enumerate(levels, 1):
        within = [f"{sum(accuracies[:k]):.1%}" for k in ranks]
        table.add_row(f"t+{level}", *within, f"{acceptance:.1%}")
    Console().print(table)


def check_paths(paths: list[Path]) -> None:
    """Refuse files that do not exist."""
    for path in paths:
        if not path.exists():
            raise typer.BadParameter(f"{path} does not exist")


def echo_result(out: Path, result: dict[str, Any]) -> None:
    """Say what trained weights take and how often their guesses are right."""
    levels = [f"{v:.1%}" for name, v in result.items() if name.startswith("accuracy_")]
    said = f"accuracy at t+1 to t+{len(levels)}: {', '.join(levels)}"
    if not levels:
        said = (
            f"top-1 agreement {result['top1']:.1%}, expected acceptance"
            f" {result['acceptance']:.1%}"
        )
    typer.echo(f"{out}: {result['size_mb']} MB, KL {result['kl']:.3f}, {said}")


@contextmanager
def one_line_errors(command: str) -> Iterator[None]:
    """End the command with one line when it fails.

    Raises:
        typer.Exit: it did.
    """
    try:
        yield
    except (OSError, ValueError) as error:
        typer.echo(f"treespec train {command}: {error}", err=True)
        raise typer.Exit(1) from None
