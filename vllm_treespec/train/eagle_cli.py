"""``treespec train eagle``."""

from enum import StrEnum
from typing import Annotated

import typer

from vllm_treespec.train.head_cli import (
    BatchTokens,
    Epochs,
    Evaluations,
    HotTokens,
    MaxMb,
    MaxSteps,
    MeasuredDepth,
    Out,
    PeakRate,
    Prompts,
    SaveSteps,
    SeqLen,
    StepDecay,
    Steps,
    Target,
    Text,
    TextShare,
    TextTokens,
    TopK,
    Work,
    check_paths,
    echo_result,
    one_line_errors,
)


class Layers(StrEnum):
    """Which hidden states of the target a head reads."""

    ONE = "one"
    THREE = "three"


def eagle(
    target: Target,
    out: Out,
    prompts: Prompts = None,
    text: Text = None,
    text_tokens: TextTokens = 1_000_000,
    work: Work = None,
    version: Annotated[
        int, typer.Option(min=1, max=3, help="3: EAGLE-3; 1: EAGLE-1 and EAGLE-2.")
    ] = 3,
    layers: Annotated[
        Layers | None,
        typer.Option(
            help="Hidden states that are read: of a low, a middle and a high layer, or"
            " the final ones (default: three for EAGLE-3, one for EAGLE-1)."
        ),
    ] = None,
    norm_output: Annotated[
        bool | None,
        typer.Option(help="Feed back the normed output (default: EAGLE-3 does)."),
    ] = None,
    norm_layers: Annotated[
        bool | None,
        typer.Option(help="Norm each layer's states (default: with three layers)."),
    ] = None,
    hot_tokens: HotTokens = 8192,
    depth: MeasuredDepth = 5,
    steps: Steps = 3,
    step_decay: StepDecay = 0.8,
    feature_weight: Annotated[
        float,
        typer.Option(help="Weight of EAGLE-1's loss on features (--layers one)."),
    ] = 0.0,
    feature_noise: Annotated[
        float, typer.Option(help="Uniform noise on the target's features, up to this.")
    ] = 0.0,
    epochs: Epochs = 3,
    max_steps: MaxSteps = None,
    text_share: TextShare = 1.0,
    lr: PeakRate = 1e-3,
    batch_tokens: BatchTokens = 4096,
    seq_len: SeqLen = 512,
    top_k: TopK = 64,
    save_steps: SaveSteps = 100,
    evaluations: Evaluations = 5,
    max_mb: MaxMb = None,
    seed: int = 0,
) -> None:
    """Train an EAGLE head for TARGET on its own text; run again to resume."""
    check_paths(prompts, text)
    first = version == 1
    number = layers or (Layers.ONE if first else Layers.THREE)
    three = number == Layers.THREE
    check_eagle(version, number, norm_layers, feature_weight)
    # Torch and transformers take seconds to import; --help should not wait.
    from vllm_treespec.train.pair_head import PairOptions
    from vllm_treespec.train.pair_pipeline import make_pair_head
    from vllm_treespec.train.pair_start import eagle_config
    from vllm_treespec.train.pipeline import collect_text
    from vllm_treespec.train.teacher import TeacherOptions
    from vllm_treespec.train.text import TextOptions

    stages = work or out / "work"
    sizes = {
        "version": version,
        "num_hot_tokens": hot_tokens or None,
        "depth": depth,
        "norm_output": not first if norm_output is None else norm_output,
        "norm_layers": three if norm_layers is None else norm_layers,
    }
    text_options = TextOptions(num_tokens=text_tokens, seed=seed)
    options = PairOptions(
        epochs=epochs,
        lr=lr,
        batch_tokens=batch_tokens,
        steps=steps,
        step_decay=step_decay,
        feature_weight=feature_weight,
        feature_noise=feature_noise,
        max_steps=max_steps,
        text_share=text_share,
        save_steps=save_steps,
        evaluations=evaluations,
        seed=seed,
    )
    with one_line_errors("eagle"):
        record = make_pair_head(
            target,
            out,
            stages,
            collect_text(target, stages, prompts, text, text_options),
            lambda model: eagle_config(model, number.value, sizes),
            TeacherOptions(top_k=top_k, seq_len=seq_len),
            options,
            max_mb,
        )
    echo_result(out, record["result"], depth)


def check_eagle(
    version: int, layers: Layers, norm_layers: bool | None, feature_weight: float
) -> None:
    """Refuse options that exclude each other.

    Raises:
        typer.BadParameter: they do; the message names both.
    """
    if version == 2:
        raise typer.BadParameter(
            "--version 2: EAGLE-2's heads are EAGLE-1's; pass --version 1"
        )
    if version == 1 and layers == Layers.THREE:
        raise typer.BadParameter(
            "--version 1 reads the final hidden state; leave out --layers three"
        )
    if version == 1 and norm_layers:
        raise typer.BadParameter("--norm-layers is for EAGLE-3; leave it out")
    if layers == Layers.THREE and feature_weight:
        raise typer.BadParameter(
            "--feature-weight needs the target's own features; pass --layers one"
        )
