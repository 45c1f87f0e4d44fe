"""The commands of ``treespec train``."""

from pathlib import Path
from typing import Annotated

import typer

from vllm_treespec.train.eagle_cli import eagle
from vllm_treespec.train.head_cli import add_commands, check_paths, one_line_errors
from vllm_treespec.train.lyanna_cli import lyanna

app = typer.Typer(
    name="train",
    help="Train what a target model drafts with.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback()
def _group() -> None:
    """Train what a target model drafts with."""


@app.command()
def draft(
    target: Annotated[str, typer.Option(help="Target model: folder or hub id.")],
    out: Annotated[Path, typer.Option(help="Folder to write; OUT/work keeps stages.")],
    prompts: Annotated[
        list[Path] | None,
        typer.Option(help="JSONL of questions to the target (or .gz); repeatable."),
    ] = None,
    text: Annotated[
        list[Path] | None,
        typer.Option(help="The target's own text, made before; repeatable."),
    ] = None,
    text_tokens: Annotated[int, typer.Option(help="Answer tokens to make.")] = 600_000,
    hidden_size: Annotated[int, typer.Option(help="A multiple of --heads.")] = 192,
    layers: int = 3,
    heads: int = 3,
    head_dim: int = 64,
    intermediate_size: int = 768,
    epochs: float = 8,
    lr: Annotated[float, typer.Option(help="Peak, of the layers.")] = 2e-3,
    embedding_lr: Annotated[float, typer.Option(help="Peak, of the embedding.")] = 1e-3,
    batch_tokens: Annotated[int, typer.Option(help="Tokens of one step.")] = 4096,
    core_rows: Annotated[
        int, typer.Option(help="Tokens in every step's softmax; 0 = all (slower).")
    ] = 8192,
    exact_share: Annotated[
        float, typer.Option(help="Last share of steps with the whole softmax.")
    ] = 0.1,
    hot_tokens: Annotated[
        int, typer.Option(help="Likeliest tokens, the ones to draft; 0 = all.")
    ] = 8192,
    seq_len: Annotated[int, typer.Option(help="Conversations are cut here.")] = 512,
    top_k: Annotated[int, typer.Option(help="Target tokens kept a position.")] = 64,
    save_steps: Annotated[int, typer.Option(help="Steps between checkpoints.")] = 200,
    max_mb: Annotated[
        float | None, typer.Option(help="Refuse weights larger than this.")
    ] = None,
    seed: int = 0,
) -> None:
    """Train a draft model on text and distributions of TARGET; run again to resume."""
    check_paths(prompts, text)
    if hidden_size % heads:
        raise typer.BadParameter(
            f"--hidden-size {hidden_size} is no multiple of --heads {heads}:"
            " transformers refuses such a Llama"
        )
    # Torch and transformers take seconds to import; --help should not wait for them.
    from vllm_treespec.train.draft import DraftOptions
    from vllm_treespec.train.model import DraftShape
    from vllm_treespec.train.pipeline import collect_text, make_draft
    from vllm_treespec.train.teacher import TeacherOptions
    from vllm_treespec.train.text import TextOptions

    text_options = TextOptions(num_tokens=text_tokens, seed=seed)
    shape = DraftShape(hidden_size, layers, heads, head_dim, intermediate_size)
    options = DraftOptions(
        epochs=epochs,
        lr=lr,
        embedding_lr=embedding_lr,
        batch_tokens=batch_tokens,
        core_rows=core_rows,
        exact_share=exact_share,
        save_steps=save_steps,
        seed=seed,
    )
    with one_line_errors("draft"):
        record = make_draft(
            target,
            out,
            collect_text(target, out / "work", prompts, text, text_options),
            shape,
            TeacherOptions(top_k=top_k, seq_len=seq_len),
            options,
            hot_tokens,
            max_mb,
        )
    result = record["result"]
    typer.echo(
        f"{out}: {result['size_mb']} MB, KL {result['kl']:.3f}, top-1 agreement"
        f" {result['top1']:.1%}, expected acceptance {result['acceptance']:.1%}"
    )


add_commands(app)
app.command()(eagle)
app.command()(lyanna)
