"""The command `treespec`. Heavy modules are imported by the commands that use them."""

import json
import os
from pathlib import Path
from typing import Annotated, Literal

import typer

from vllm_treespec import __version__
from vllm_treespec.ray_nodes import plugins_problem
from vllm_treespec.tools.batch.cli import batch
from vllm_treespec.tools.plan.cli import plan
from vllm_treespec.tools.soak.cli import soak
from vllm_treespec.tools.tune.cli import tune

app = typer.Typer(
    name="treespec",
    help="Lossless tree speculative decoding through stock vLLM.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

PASS_ON = {
    "allow_extra_args": True,
    "ignore_unknown_options": True,
    "help_option_names": [],
}


Device = Literal["cpu", "cuda"]


def _fail(error: Exception) -> typer.Exit:
    """Print the error as one line on stderr; the result is to be raised."""
    typer.echo(f"treespec: {error}", err=True)
    return typer.Exit(1)


def print_version(asked: bool) -> None:
    """Print our version and end, if asked to."""
    if asked:
        typer.echo(f"treespec {__version__}")
        raise typer.Exit


@app.callback()
def say_when_left_out(
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            help="Print the version.",
            callback=print_version,
            is_eager=True,
        ),
    ] = False,
) -> None:
    """Lossless tree speculative decoding through stock vLLM."""
    if problem := plugins_problem(os.environ.get("VLLM_PLUGINS")):
        what, remedy = problem
        text = f"treespec: {what}, so vLLM does not know our methods; {remedy}"
        typer.echo(text, err=True)


@app.command()
def assets(
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON only on stdout.")
    ] = False,
    directory: Annotated[
        Path | None,
        typer.Option("--dir", help="Where fetched models go.", file_okay=False),
    ] = None,
) -> None:
    """Get the demo's target model if it is missing; print where the models lie."""
    from vllm_treespec.tools.assets import AssetError, drafters, ensure_target

    try:
        target = ensure_target(directory)
    except AssetError as error:
        raise _fail(error) from None
    paths = {name: str(path) for name, path in drafters().items()}
    if as_json:
        typer.echo(json.dumps({"target": str(target), "drafters": paths}, indent=2))
        return
    typer.echo(f"target   {target}")
    for path in paths.values():
        typer.echo(f"drafter  {path}")
    if not paths:
        typer.echo("drafter  none in a wheel; they lie in a checkout of the project")


@app.command()
def methods() -> None:
    """List the methods: what each drafts, and what it needs."""
    from vllm_treespec.config import METHODS, register_installed

    problems = register_installed()
    for name, method in METHODS.items():
        what = (method.__doc__ or "").partition("\n")[0]
        typer.echo(f"{name:12} {what} Needs {method.NEEDS}.")
    for problem in problems:
        typer.echo(f"treespec: {problem}", err=True)
    if problems:
        raise typer.Exit(1)


@app.command()
def doctor(
    target: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL", help="Check this folder or hub id instead, by its config."
        ),
    ] = None,
    speculative_config: Annotated[
        str | None,
        typer.Option(
            metavar="JSON|FILE", help="With --target: check this spec-config too."
        ),
    ] = None,
    max_model_len: Annotated[
        int | None, typer.Option(help="With --target: as vLLM gets it.", min=1)
    ] = None,
    tensor_parallel_size: Annotated[
        int, typer.Option(help="With --target: as vLLM gets it.", min=1)
    ] = 1,
    device: Annotated[
        Device | None,
        typer.Option(help="What vLLM is to run on, here or elsewhere. [default: here]"),
    ] = None,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Print everything that is checked.")
    ] = False,
) -> None:
    """Say whether draft trees work with this vLLM, or for a model."""
    from rich.console import Console

    from vllm_treespec.config import SpecConfigError
    from vllm_treespec.engine import seams
    from vllm_treespec.engine.refusals import platform_device
    from vllm_treespec.tools import openmp

    if target is None:
        try:
            if speculative_config or max_model_len or tensor_parallel_size > 1:
                raise SpecConfigError(
                    "--speculative-config, --max-model-len and --tensor-parallel-size "
                    "need --target"
                )
            on = device or platform_device()
            works = seams.doctor(Console(), on, verbose)
        except SpecConfigError as error:
            raise _fail(error) from None
        if on == "cpu":
            openmp.report(Console())
    else:
        from vllm_treespec.tools.target_doctor import TargetCheck, check_target

        check = TargetCheck(
            target, speculative_config, max_model_len, tensor_parallel_size, device
        )
        works = check_target(check, Console(), verbose)
    if not works:
        raise typer.Exit(1)


@app.command()
def expand(
    speculative_config: Annotated[
        str,
        typer.Argument(metavar="JSON|FILE", help="A spec-config."),
    ],
    target: Annotated[
        str | None,
        typer.Option(metavar="MODEL", help="The target model the spec-config is for."),
    ] = None,
    device: Annotated[Device, typer.Option(help="What vLLM runs on.")] = "cpu",
) -> None:
    """Print the stock vLLM arguments a spec-config stands for."""
    from vllm_treespec import plugin

    try:
        arguments = plugin.expand(speculative_config, target, device)
    except ValueError as error:
        raise _fail(error) from None
    typer.echo(json.dumps(arguments, indent=2))


@app.command(context_settings=PASS_ON)
def train(context: typer.Context) -> None:
    """Train draft models: `treespec train --help` lists what can be trained."""
    from vllm_treespec.train import cli

    typer.main.get_group(cli.app).main(args=context.args, prog_name="treespec train")


@app.command()
def convert_head(
    model: Annotated[
        str, typer.Argument(metavar="IN", help="Folder or hub id of the head.")
    ],
    out: Annotated[
        Path, typer.Argument(metavar="OUT", help="New folder.", file_okay=False)
    ],
    dtype: Annotated[
        Literal["bfloat16", "float16", "float32"] | None,
        typer.Option(help="Of the weights; without it, as they are."),
    ] = None,
) -> None:
    """Convert a published EAGLE head from pytorch_model.bin to safetensors."""
    import torch

    from vllm_treespec.heads import convert

    typer.echo(f"Reading {model}")
    try:
        kind = getattr(torch, dtype) if dtype else None
        size_mb = convert.convert_head(model, out, kind)
        typer.echo(f"Wrote {out}, {size_mb:.0f} MB")
    except (OSError, ValueError) as error:
        raise _fail(error) from None


@app.command()
def shrink(
    draft: Annotated[
        str, typer.Argument(metavar="DRAFT", help="Draft model: folder or hub id.")
    ],
    out: Annotated[
        Path, typer.Argument(metavar="OUT", help="New folder.", file_okay=False)
    ],
    text: Annotated[
        Path | None,
        typer.Option(
            help="Text like the target's answers, for hot tokens: any JSONL (or .gz), "
            "or plain text. Without it every token is drafted.",
        ),
    ] = None,
    hot_tokens: Annotated[
        int, typer.Option(min=1, help="The text's commonest tokens, which are drafted.")
    ] = 32768,
    tokenizer: Annotated[
        str | None,
        typer.Option(help="Whose tokenizer it has, if its own folder holds none."),
    ] = None,
) -> None:
    """Make a draft model cheaper to run: int8 weights, and hot tokens alone."""
    from rich.console import Console

    from vllm_treespec.tools import shrink as shrinking

    console = Console()
    try:
        shrunk = shrinking.shrink(draft, out, text, hot_tokens, tokenizer, console)
    except (OSError, ValueError) as error:
        raise _fail(error) from None
    console.print(shrinking.table(shrunk))


app.command()(plan)
app.command()(soak)
app.command()(tune)
app.command(
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True}
)(batch)


@app.command()
def demo(
    target: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL", help="The target; without one, SmolLM2-135M-Instruct."
        ),
    ] = None,
    head: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL", help="Its ReDrafter head; without one, the shipped head."
        ),
    ] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="JSONL with 'workload' and 'prompt'; without it, ours."
        ),
    ] = None,
) -> None:
    """Measure chat, code and editing on a small model; say which method to use."""
    from vllm_treespec.tools.demo import main

    main(target, head, prompts)
