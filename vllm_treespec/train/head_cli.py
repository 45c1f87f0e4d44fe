"""``treespec train redrafter``, ``medusa`` and ``evaluate``."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

Target = Annotated[str, typer.Option(help="Target model: folder or hub id.")]
Prompts = Annotated[
    list[Path] | None,
    typer.Option(
        "--data", "--prompts", help="JSONL of questions to the target; repeatable."
    ),
]
Text = Annotated[
    list[Path] | None,
    typer.Option(help="The target's own text, made before; repeatable."),
]
Work = Annotated[
    Path | None,
    typer.Option(
        help="Folder of text, hidden states and checkpoints (default OUT/work); heads"
        " trained on the same text can share it."
    ),
]
Out = Annotated[Path, typer.Option(help="Folder of the head to write.")]
TextTokens = Annotated[int, typer.Option(help="Tokens to make.")]
HotTokens = Annotated[
    int, typer.Option(help="Likeliest tokens the head drafts; 0 = all.")
]
Epochs = Annotated[float, typer.Option(help="Passes over the text.")]
PeakRate = Annotated[float, typer.Option(help="Peak learning rate.")]
SaveSteps = Annotated[int, typer.Option(help="Between checkpoints.")]
MaxMb = Annotated[float | None, typer.Option(help="Refuse weights larger than this.")]
SeqLen = Annotated[int, typer.Option(help="Conversations are cut here.")]
TextShare = Annotated[
    float,
    typer.Option(
        min=0.001,
        max=1.0,
        help="Train on this share of the text; evaluation is on the same rest.",
    ),
]
MaxSteps = Annotated[
    int | None,
    typer.Option(min=1, help="Optimiser steps to take, whatever --epochs says."),
]
StepDecay = Annotated[
    float, typer.Option(help="Weight of a level, times that of the one before.")
]
BatchTokens = Annotated[int, typer.Option(help="Tokens of one step.")]
Evaluations = Annotated[int, typer.Option(min=1, help="On the way.")]
Steps = Annotated[int, typer.Option(min=1, help="Levels trained, unrolled.")]
MeasuredDepth = Annotated[int, typer.Option(min=1, help="Levels that are measured.")]
TopK = Annotated[int, typer.Option(help="Target tokens kept a position.")]


def add_commands(app: typer.Typer) -> None:
    """Add the commands for heads to ``treespec train``."""
    for method, noun in (("redrafter", "a ReDrafter head"), ("medusa", "Medusa heads")):
        help_text = f"Train {noun} for TARGET on its own text; run again to resume."
        app.command(method, help=help_text)(_train_command(method))
    app.command("evaluate")(evaluate)


def _train_command(method: str) -> Callable[..., None]:
    """Make the command that trains heads of one method."""

    def train(
        target: Target,
        out: Out,
        prompts: Prompts = None,
        text: Text = None,
        text_tokens: TextTokens = 1_000_000,
        work: Work = None,
        hot_tokens: HotTokens = 8192,
        own_embedding: Annotated[
            bool, typer.Option("--own-embedding", help="Train a copy of it.")
        ] = False,
        own_output: Annotated[
            bool, typer.Option("--own-output", help="Train a copy of the output layer.")
        ] = False,
        depth: Annotated[int, typer.Option(help="Levels: t+1 to t+DEPTH.")] = 5,
        blocks: Annotated[int, typer.Option(help="ResNet blocks.")] = 2,
        inner_size: Annotated[
            int, typer.Option(help="ReDrafter: width of blocks; 0 = 2 x hidden size.")
        ] = 0,
        epochs: Epochs = 6,
        max_steps: MaxSteps = None,
        text_share: TextShare = 1.0,
        lr: PeakRate = 2e-3,
        batch_positions: Annotated[int, typer.Option(help="Of one step.")] = 2048,
        seq_len: SeqLen = 512,
        top_k: TopK = 64,
        save_steps: SaveSteps = 100,
        max_mb: MaxMb = None,
        seed: int = 0,
    ) -> None:
        check_paths(prompts, text)
        if inner_size and method != "redrafter":
            raise typer.BadParameter("--inner-size is for redrafter; leave it out")
        # Torch and transformers take seconds to import; --help should not wait.
        from vllm_treespec.sources.base import FINAL_LAYER
        from vllm_treespec.train.head import HeadOptions
        from vllm_treespec.train.pipeline import collect_text, make_head
        from vllm_treespec.train.teacher import TeacherOptions
        from vllm_treespec.train.text import TextOptions

        stages = work or out / "work"
        sizes = {
            "num_hot_tokens": hot_tokens or None,
            "depth": depth,
            "num_blocks": blocks,
            "share_embedding": not own_embedding,
            "share_output": not own_output,
            **({"inner_size": inner_size} if inner_size else {}),
        }
        text_options = TextOptions(num_tokens=text_tokens, seed=seed)
        teacher = TeacherOptions(top_k=top_k, seq_len=seq_len, layers=(FINAL_LAYER,))
        options = HeadOptions(
            epochs=epochs,
            lr=lr,
            batch_positions=batch_positions,
            max_steps=max_steps,
            text_share=text_share,
            save_steps=save_steps,
            seed=seed,
        )
        with one_line_errors(method):
            rows = collect_text(target, stages, prompts, text, text_options)
            record = make_head(
                target, out, stages, rows, method, sizes, teacher, options, max_mb
            )
        echo_result(out, record["result"], depth)

    return train


def evaluate(
    head: Annotated[Path, typer.Argument(help="Folder of a head.")],
    target: Target,
    text: Annotated[list[Path], typer.Option(help="The target's text; repeatable.")],
    work: Annotated[Path, typer.Option(help="Folder for hidden states.")],
    json_file: Annotated[
        Path | None, typer.Option("--json", help="File for these figures.")
    ] = None,
    seq_len: SeqLen = 512,
    top_k: TopK = 64,
) -> None:
    """Measure a head, by level: is its guess the target's likeliest token?

    The levels of an EAGLE or Lyanna head follow its own drafts, of the text's tokens.
    """
    check_paths(None, text)
    from vllm_treespec.heads import EagleHeadConfig, read_head_config
    from vllm_treespec.sources.base import FINAL_LAYER
    from vllm_treespec.train.pair_pipeline import evaluate_pair_folder
    from vllm_treespec.train.pipeline import collect_text, evaluate_folder
    from vllm_treespec.train.teacher import TeacherOptions
    from vllm_treespec.train.text import TextOptions

    options = TeacherOptions(top_k=top_k, seq_len=seq_len, layers=(FINAL_LAYER,))
    with one_line_errors("evaluate"):
        rows = collect_text(target, work, None, text, TextOptions())
        reads_pairs = isinstance(read_head_config(head), EagleHeadConfig)
        measured = evaluate_pair_folder if reads_pairs else evaluate_folder
        found = measured(target, head, work, rows, options)
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


def check_paths(prompts: list[Path] | None, text: list[Path] | None) -> None:
    """Refuse files that do not exist."""
    for path in [*(prompts or []), *(text or [])]:
        if not path.exists():
            raise typer.BadParameter(f"{path} does not exist")


def echo_result(out: Path, result: dict[str, Any], depth: int) -> None:
    """Say what a trained head weighs and how often its guesses are right."""
    accuracies = [f"{result[f'accuracy_{i + 1}']:.1%}" for i in range(depth)]
    typer.echo(
        f"{out}: {result['size_mb']} MB, KL {result['kl']:.3f}, accuracy at t+1 to"
        f" t+{depth}: {', '.join(accuracies)}"
    )


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
