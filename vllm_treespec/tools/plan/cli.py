"""The command ``treespec plan``."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

if TYPE_CHECKING:
    from rich.table import Table

    from vllm_treespec.tools.plan.memory import MemoryPlan

GIB = 2**30


def plan(
    target: Annotated[
        str,
        typer.Argument(help="A model's folder, its config.json, or a hub id."),
    ],
    gpu_memory: Annotated[
        str,
        typer.Option(metavar="SIZE", help="Of each card, such as 80GiB."),
    ],
    speculative_config: Annotated[
        str,
        typer.Option(metavar="JSON|FILE", help="The spec-config."),
    ],
    tensor_parallel_size: Annotated[int, typer.Option(min=1, help="Cards.")] = 1,
    gpu_memory_utilization: Annotated[
        float, typer.Option(min=0.01, max=1, help="What vLLM may use of a card.")
    ] = 0.92,
    max_model_len: Annotated[
        int | None, typer.Option(min=1, help="Without it, what the target can read.")
    ] = None,
    max_num_seqs: Annotated[
        int | None, typer.Option(min=1, help="Running requests at most.")
    ] = None,
    max_num_batched_tokens: Annotated[
        int | None, typer.Option(min=1, help="Tokens of a forward at most.")
    ] = None,
    block_size: Annotated[
        int | None, typer.Option(min=1, help="Tokens of a KV block.")
    ] = None,
    dtype: Annotated[
        Literal["auto", "bfloat16", "float16", "float32"],
        typer.Option(help="Of weights and KV."),
    ] = "auto",
    device: Annotated[
        Literal["cuda", "cpu"], typer.Option(help="What vLLM runs on.")
    ] = "cuda",
    allowance: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="Instead of the estimate, such as 4GiB."),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON only on stdout, in bytes.")
    ] = False,
) -> None:
    """Print what takes the memory of a card, from configurations alone."""
    from rich.console import Console

    from vllm_treespec.config import read_spec
    from vllm_treespec.tools.plan import memory
    from vllm_treespec.tools.plan.parts import Settings, read_parts

    try:
        settings = Settings(
            num_ranks=tensor_parallel_size,
            memory=read_size("--gpu-memory", gpu_memory),
            device=device,
            utilization=gpu_memory_utilization,
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            block_size=block_size,
            dtype=dtype,
            allowance=read_size("--allowance", allowance) if allowance else None,
        )
        parts = read_parts(target, read_spec(speculative_config), settings)
        made = memory.make_plan(parts, settings)
        ways = [] if made.fits else memory.remedies(parts, settings, made)
    except ValueError as error:
        typer.echo(f"treespec plan: {error}", err=True)
        raise typer.Exit(1) from None
    if as_json:
        typer.echo(json.dumps(as_dict(made, ways), indent=2))
    else:
        console = Console()
        console.print(table(made, target, settings.num_ranks))
        typer.echo(verdict(made, ways))
    if not made.fits:
        raise typer.Exit(1)


def read_size(option: str, text: str) -> int:
    """Bytes of a size such as 80GiB.

    Raises:
        ValueError: it is no size of a memory.

    """
    from pydantic import ByteSize, TypeAdapter

    try:
        size = int(TypeAdapter(ByteSize).validate_python(text))
    except ValueError:
        size = 0
    if size < 2**20:
        raise ValueError(f"{option} {text!r} is no size; write one such as 80GiB")
    return size


def table(made: MemoryPlan, target: str, num_ranks: int) -> Table:
    """The parts of a card's memory."""
    from rich.table import Table

    cards = "one card" if num_ranks == 1 else f"each of {num_ranks} cards"
    shown = Table(title=f"{target}: memory of {cards}", title_justify="left")
    shown.add_column("part")
    shown.add_column("GiB", justify="right")
    shown.add_column("what it is")
    for row in made.rows:
        shown.add_row(row.name, f"{row.num_bytes / GIB:.2f}", row.note)
    total = sum(row.num_bytes for row in made.rows)
    shown.add_section()
    shown.add_row("all", f"{total / GIB:.2f}", "")
    return shown


def verdict(made: MemoryPlan, ways: list[str]) -> str:
    """Whether it fits, and what to change if not."""
    length = made.max_model_len
    if made.fits:
        return (
            f"It fits: {made.num_tokens:,} tokens in {made.num_blocks:,} blocks, "
            f"{made.num_requests:,} x {length:,} tokens at the same time."
        )
    lacks = f"a request of {length:,} tokens lacks {made.missing / GIB:.2f} GiB a card"
    if not ways:
        return f"It does not fit: {lacks}. Use a smaller model, or larger cards."
    return f"It does not fit: {lacks}. Pass {', or '.join(ways)}."


def as_dict(made: MemoryPlan, ways: list[str]) -> dict[str, Any]:
    """The plan for JSON, sizes in bytes."""
    return {
        "fits": made.fits,
        "bytes": {row.key: row.num_bytes for row in made.rows},
        "missing_bytes": made.missing,
        "token_bytes": made.token_bytes,
        "block_size": made.block_size,
        "num_blocks": made.num_blocks,
        "num_tokens": made.num_tokens,
        "max_model_len": made.max_model_len,
        "num_requests": made.num_requests,
        "remedies": ways,
    }
