"""The stages for EAGLE heads; each continues an interrupted run."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from transformers import PreTrainedModel

from vllm_treespec.heads import (
    EagleHeadConfig,
    HeadError,
    load_eagle_head,
    save_published,
)
from vllm_treespec.train.atomic_files import atomic_writes
from vllm_treespec.train.eagle import EagleOptions, evaluate_eagle, train_eagle
from vllm_treespec.train.eagle_start import eagle_config, start_eagle
from vllm_treespec.train.model import check_size
from vllm_treespec.train.pipeline import (
    cached_teacher,
    head_record,
    print_size,
    write_record,
)
from vllm_treespec.train.plot import plot_head_history
from vllm_treespec.train.teacher import TeacherOptions, load_target
from vllm_treespec.train.text import Row


def make_eagle(
    target: str,
    out: Path,
    work: Path,
    rows: list[Row],
    layers: str,
    sizes: dict[str, Any],
    teacher_options: TeacherOptions,
    options: EagleOptions,
    max_mb: float | None = None,
) -> dict[str, Any]:
    """Stages 2 and 3: cache, train, write the head's folder.

    ``out`` gets config.json, model.safetensors, training.json and curves.png; so that
    several heads can share ``work``, ``out/checkpoints`` gets the checkpoints.

    Args:
        layers: see ``eagle_start.layers_to_read``.
        sizes: fields of its head config besides those that the target gives.

    Returns:
        What training.json holds.

    Raises:
        ValueError: the head and the target or the options do not fit, or the weights
            are larger than ``max_mb``.
    """
    console = Console()
    out.mkdir(parents=True, exist_ok=True)
    model = load_target(target)
    config = eagle_config(model, layers, sizes)
    teacher_options = replace(teacher_options, layers=config.layers)
    cache = cached_teacher(model, target, rows, work, teacher_options, console)
    torch.manual_seed(options.seed)
    head = start_eagle(config, model, cache.statistics)
    del model
    print_size("eagle", head, console)
    result = train_eagle(head, cache, out / "checkpoints", options)
    history, ranks = result.pop("history"), result.pop("rank_accuracies")
    head.config = EagleHeadConfig.model_validate(
        {**config.model_dump(), "rank_accuracies": ranks}
    )
    plot_head_history(history, out / "curves.png")
    with atomic_writes(out) as partial:
        size_mb = save_published(head, partial)
    check_size(out / "model.safetensors", max_mb, "--hot-tokens")
    record = head_record(result, size_mb, ranks, options)
    return write_record(out, target, rows, cache, teacher_options, record, history)


def evaluate_eagle_folder(
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
    head = load_eagle_head(folder, num_layers).float()
    check_target(head.config, folder, model, target)
    options = replace(teacher_options, layers=head.config.layers)
    cache = cached_teacher(model, target, rows, work, options, Console())
    head = head.to(model.device)
    head.share(
        model.get_input_embeddings().weight, model.get_output_embeddings().weight
    )
    return evaluate_eagle(head, cache)


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
