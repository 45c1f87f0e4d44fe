"""The stages for heads that read pairs; each continues an interrupted run."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from transformers import PreTrainedModel

from vllm_treespec.atomic_files import atomic_writes
from vllm_treespec.heads import (
    EagleHead,
    EagleHeadConfig,
    HeadError,
    LyannaHead,
    LyannaHeadConfig,
    load_eagle_head,
    load_lyanna_head,
    read_head_config,
    save_head,
    save_published,
)
from vllm_treespec.train.model import check_size
from vllm_treespec.train.pair_head import (
    PairOptions,
    evaluate_pair_head,
    train_pair_head,
)
from vllm_treespec.train.pair_start import start_pair_head
from vllm_treespec.train.pipeline import (
    cached_teacher,
    head_record,
    print_size,
    write_record,
)
from vllm_treespec.train.plot import plot_head_history
from vllm_treespec.train.teacher import TeacherOptions, load_target
from vllm_treespec.train.text import Row

# What training.json says of a Lyanna head; its ablations differ in these.
VARIANTS = {"first_token", "context", "token_info_rank", "token_info"}


def make_pair_head(
    target: str,
    out: Path,
    work: Path,
    rows: list[Row],
    make_config: Callable[[PreTrainedModel], EagleHeadConfig],
    teacher_options: TeacherOptions,
    options: PairOptions,
    max_mb: float | None = None,
) -> dict[str, Any]:
    """Stages 2 and 3: cache, train, write the head's folder.

    ``out`` gets config.json, model.safetensors, training.json and curves.png; so that
    several heads can share ``work``, ``out/checkpoints`` gets the checkpoints.

    Args:
        make_config: makes the head's configuration for the target.

    Returns:
        What training.json holds.

    Raises:
        ValueError: the head and the target or the options do not fit, or the weights
            are larger than ``max_mb``.
    """
    console = Console()
    out.mkdir(parents=True, exist_ok=True)
    model = load_target(target)
    config = make_config(model)
    teacher_options = replace(teacher_options, layers=config.layers)
    cache = cached_teacher(model, target, rows, work, teacher_options, console)
    torch.manual_seed(options.seed)
    head = start_pair_head(config, model, cache.statistics)
    del model
    print_size(config.method, head, console)
    result = train_pair_head(head, cache, out / "checkpoints", options)
    history, ranks = result.pop("history"), result.pop("rank_accuracies")
    head.config = type(config).model_validate(
        {**config.model_dump(), "rank_accuracies": ranks}
    )
    plot_head_history(history, out / "curves.png")
    with atomic_writes(out) as partial:
        size_mb = (
            save_head(head, partial)
            if isinstance(head, LyannaHead)
            else save_published(head, partial)
        )
    check_size(out / "model.safetensors", max_mb, "--hot-tokens")
    record = head_record(result, size_mb, ranks, options)
    if isinstance(config, LyannaHeadConfig):
        record["head"] = config.model_dump(include=VARIANTS)
    return write_record(out, target, rows, cache, teacher_options, record, history)


def evaluate_pair_folder(
    target: str,
    folder: Path,
    work: Path,
    rows: list[Row],
    teacher_options: TeacherOptions,
) -> dict[str, list[Any]]:
    """Measure a head's folder on text; all rows are used.

    Raises:
        HeadError: the folder holds no head, or one for another target.
    """
    model = load_target(target)
    num_layers = model.config.get_text_config().num_hidden_layers
    head = load_pair_head(folder, num_layers).float()
    check_target(head.config, folder, model, target)
    options = replace(teacher_options, layers=head.config.layers)
    cache = cached_teacher(model, target, rows, work, options, Console())
    head = head.to(model.device)
    head.share(
        model.get_input_embeddings().weight, model.get_output_embeddings().weight
    )
    return evaluate_pair_head(head, cache)


def load_pair_head(folder: Path, num_target_layers: int) -> EagleHead:
    """Load an EAGLE or Lyanna head; shared weights are missing until ``share``.

    Raises:
        HeadError: it is neither, or its files do not fit together.
    """
    if isinstance(read_head_config(folder), LyannaHeadConfig):
        return load_lyanna_head(folder)
    return load_eagle_head(folder, num_target_layers)


def check_target(
    config: EagleHeadConfig, folder: Path, model: PreTrainedModel, target: str
) -> None:
    """Refuse a head for another target.

    Raises:
        HeadError: the sizes differ.
    """
    known = model.config.get_text_config()
    theirs = (known.hidden_size, known.vocab_size)
    ours = (config.target_hidden_size, config.vocab_size)
    if ours != theirs:
        raise HeadError(
            f"{folder} is for hidden states of {ours[0]} and {ours[1]} tokens, {target}"
            f" has {theirs[0]} and {theirs[1]}: pass the target that it was trained for"
        )
