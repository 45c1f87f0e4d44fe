"""``treespec train lyanna``."""

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


class Told(StrEnum):
    """Which tokens give information about the one after them."""

    HOT = "hot"
    ALL = "all"


def lyanna(
    target: Target,
    out: Out,
    prompts: Prompts = None,
    text: Text = None,
    text_tokens: TextTokens = 1_000_000,
    work: Work = None,
    first_token: Annotated[
        bool, typer.Option(help="Read the root's token, not its hidden state alone.")
    ] = True,
    context: Annotated[
        bool, typer.Option(help="Attend to the text before, not to the chain alone.")
    ] = True,
    token_info_rank: Annotated[
        int, typer.Option(min=0, help="Of the token info; 0: none.")
    ] = 64,
    token_info: Annotated[
        Told, typer.Option(help="Tokens that give it: the hot ones, or all.")
    ] = Told.HOT,
    token_info_lr: Annotated[
        float, typer.Option(help="Peak learning rate of the token info.")
    ] = 1e-2,
    hot_tokens: HotTokens = 8192,
    depth: MeasuredDepth = 5,
    steps: Steps = 3,
    step_decay: StepDecay = 0.8,
    feature_weight: Annotated[
        float, typer.Option(help="Weight of the mean square error of the states.")
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
    """Train a Lyanna head for TARGET on its own text; run again to resume."""
    check_paths(prompts, text)
    # Torch and transformers take seconds to import; --help should not wait.
    from vllm_treespec.train.pair_head import PairOptions
    from vllm_treespec.train.pair_pipeline import make_pair_head
    from vllm_treespec.train.pair_start import lyanna_config
    from vllm_treespec.train.pipeline import collect_text
    from vllm_treespec.train.teacher import TeacherOptions
    from vllm_treespec.train.text import TextOptions

    stages = work or out / "work"
    sizes = {
        "num_hot_tokens": hot_tokens or None,
        "depth": depth,
        "first_token": first_token,
        "context": context,
        "token_info_rank": token_info_rank,
        "token_info": token_info.value,
    }
    text_options = TextOptions(num_tokens=text_tokens, seed=seed)
    options = PairOptions(
        epochs=epochs,
        lr=lr,
        batch_tokens=batch_tokens,
        steps=steps,
        step_decay=step_decay,
        feature_weight=feature_weight,
        token_info_lr=token_info_lr,
        max_steps=max_steps,
        text_share=text_share,
        save_steps=save_steps,
        evaluations=evaluations,
        seed=seed,
    )
    with one_line_errors("lyanna"):
        record = make_pair_head(
            target,
            out,
            stages,
            collect_text(target, stages, prompts, text, text_options),
            lambda model: lyanna_config(model, sizes),
            TeacherOptions(top_k=top_k, seq_len=seq_len),
            options,
            max_mb,
        )
    echo_result(out, record["result"], depth)
