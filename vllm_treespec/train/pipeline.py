"""The three stages in a row; each continues an interrupted run."""

import json
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from transformers import AutoConfig, PreTrainedModel

from vllm_treespec.atomic_files import atomic_writes, replaced
from vllm_treespec.config.reading import read_config
from vllm_treespec.heads import (
    DraftHead,
    HeadError,
    MedusaHeadConfig,
    ReDrafterHeadConfig,
    build_head,
    load_head,
    save_head,
)
from vllm_treespec.heads.base import Head
from vllm_treespec.train.distill import DistillOptions
from vllm_treespec.train.draft import DraftOptions, train_draft
from vllm_treespec.train.head import HeadOptions, evaluate_head, train_head
from vllm_treespec.train.model import (
    DraftShape,
    TargetStatistics,
    build_draft,
    check_size,
    save_draft,
)
from vllm_treespec.train.plot import plot_head_history, plot_history
from vllm_treespec.train.teacher import (
    TeacherCache,
    TeacherOptions,
    cache_teacher,
    load_cache,
    load_target,
)
from vllm_treespec.train.text import (
    Row,
    TextOptions,
    generate_text,
    read_prompts,
    read_rows,
)


def collect_text(
    target: str,
    work: Path,
    prompts: list[Path] | None,
    text: list[Path] | None,
    options: TextOptions,
) -> list[Row]:
    """Stage 1: read ``text`` files, or let the target write ``work/text.jsonl``.

    ``work`` is made where it does not exist.

    Raises:
        ValueError: there are no rows, or one cannot be trained on.
    """
    work.mkdir(parents=True, exist_ok=True)
    config = read_config("--target", target, AutoConfig.from_pretrained)
    size = config.get_text_config().vocab_size
    if not text:
        questions = [prompt for path in prompts or [] for prompt in read_prompts(path)]
        path = work / "text.jsonl"
        generate_text(target, questions, path, options, size)
        text = [path]
    rows = [row for path in text for row in read_rows(path, size)]
    if len(rows) < 2:
        raise ValueError(f"{text[0]}: at least 2 conversations are needed")
    return rows


def make_draft(
    target: str,
    out: Path,
    rows: list[Row],
    shape: DraftShape,
    teacher_options: TeacherOptions,
    draft_options: DraftOptions,
    hot_tokens: int = 0,
    max_mb: float | None = None,
) -> dict[str, Any]:
    """Stages 2 and 3: cache the target's distributions, train, write the draft model.

    ``out`` gets config.json, model.safetensors, hot_tokens.json with the target's
    ``hot_tokens`` likeliest tokens (none if 0), and training.json (everything needed to
    judge and repeat the run); ``out/work`` the shards, checkpoints and curves.png.

    Returns:
        What training.json holds.
    """
    console = Console()
    work = out / "work"
    model = load_target(target)
    cache = cached_teacher(model, target, rows, work, teacher_options, console)
    draft = build_draft(model, shape, cache.statistics, draft_options.seed)
    del model
    console.print(f"draft: {draft.num_parameters() / 1e6:.1f} M parameters")
    result = train_draft(draft, cache, work / "draft", draft_options)
    history = result.pop("history")
    plot_history(history, work / "curves.png")
    size_mb = save_draft(draft, out, max_mb)
    if hot_tokens:
        mass = cache.statistics.token_weights
        likeliest = mass.topk(min(hot_tokens, len(mass))).indices.sort().values
        with replaced(out / "hot_tokens.json") as part:
            part.write_text(json.dumps(likeliest.tolist()) + "\n")
    record = {
        "result": {**result, "size_mb": round(size_mb, 2)},
        "shape": asdict(shape),
        "draft": asdict(draft_options),
    }
    return write_record(out, target, rows, cache, teacher_options, record, history)


def make_head(
    target: str,
    out: Path,
    work: Path,
    rows: list[Row],
    method: str,
    sizes: dict[str, Any],
    teacher_options: TeacherOptions,
    head_options: HeadOptions,
    max_mb: float | None = None,
) -> dict[str, Any]:
    """Stages 2 and 3 for a head: cache, train, write the head's folder.

    ``out`` gets config.json, model.safetensors, training.json and curves.png;
    ``work`` shards and checkpoints.

    Args:
        method: ``redrafter`` or ``medusa``.
        sizes: fields of its head config besides those that the target gives.

    Returns:
        What training.json holds.

    Raises:
        ValueError: the weights are larger than ``max_mb``.
    """
    console = Console()
    out.mkdir(parents=True, exist_ok=True)
    model = load_target(target)
    cache = cached_teacher(model, target, rows, work, teacher_options, console)
    torch.manual_seed(head_options.seed)
    head = start_head(method, sizes, model, cache.statistics)
    del model
    print_size(method, head, console)
    result = train_head(head, cache, work / method, head_options)
    history, ranks = result.pop("history"), result.pop("rank_accuracies")
    if isinstance(head.config, MedusaHeadConfig):
        config = {**head.config.model_dump(), "rank_accuracies": ranks}
        head.config = MedusaHeadConfig.model_validate(config)
    plot_head_history(history, out / "curves.png")
    with atomic_writes(out) as partial:
        size_mb = save_head(head, partial)
    check_size(out / "model.safetensors", max_mb, "--hot-tokens or --blocks")
    record = head_record(result, size_mb, ranks, head_options)
    return write_record(out, target, rows, cache, teacher_options, record, history)


def print_size(method: str, head: Head, console: Console) -> None:
    """Say how many parameters of a head are trained."""
    trained = [p for p in head.parameters() if p.requires_grad]
    console.print(f"{method}: {sum(p.numel() for p in trained) / 1e6:.1f} M parameters")


def head_record(
    result: dict[str, Any], size_mb: float, ranks: list[Any], options: DistillOptions
) -> dict[str, Any]:
    """What training.json says of a head's training, beside what all runs note."""
    return {
        "result": {**result, "size_mb": round(size_mb, 2)},
        "rank_accuracies": ranks,
        "training": asdict(options),
    }


def write_record(
    out: Path,
    target: str,
    rows: list[Row],
    cache: TeacherCache,
    teacher_options: TeacherOptions,
    record: dict[str, Any],
    history: list[dict[str, Any]],
) -> dict[str, Any]:
    """Write and return ``out/training.json``: ``record`` and what all runs note."""
    record = {
        "target": target,
        "conversations": len(rows),
        "answer_positions": len(cache.rest),
        **record,
        "teacher": asdict(teacher_options),
        "versions": {name: version(name) for name in ("torch", "transformers")},
        "evaluations": [log for log in history if "eval_kl" in log],
    }
    with replaced(out / "training.json") as part:
        part.write_text(json.dumps(record, indent=2) + "\n")
    return record


def cached_teacher(
    model: PreTrainedModel,
    target: str,
    rows: list[Row],
    work: Path,
    options: TeacherOptions,
    console: Console,
) -> TeacherCache:
    """Stage 2: the target's distributions over ``rows``, from ``work/teacher``."""
    console.print(f"teacher: {len(rows)} conversations")
    return load_cache(cache_teacher(model, target, rows, work / "teacher", options))


def start_head(
    method: str,
    sizes: dict[str, Any],
    target: PreTrainedModel,
    statistics: TargetStatistics,
) -> DraftHead:
    """Make a fresh head for a target: the likeliest tokens are hot."""
    output = target.get_output_embeddings().weight.detach()
    embedding = target.get_input_embeddings().weight.detach()
    config = {
        **sizes,
        "hidden_size": output.shape[1],
        "vocab_size": target.config.vocab_size,
    }
    if method == "medusa":
        head = build_head(MedusaHeadConfig(**config))
    else:
        head = build_head(ReDrafterHeadConfig(**config))
    if head.hot_token_ids is not None:
        head.hot_token_ids.copy_(statistics.likeliest(len(head.hot_token_ids)))
    head = head.to(output.device)
    head.share(embedding, output)
    with torch.no_grad():
        if not head.config.share_embedding:
            head.embedding.weight.copy_(embedding)
        if not head.config.share_output:
            head.output.weight.copy_(head.output_rows(output))
    return head


def evaluate_folder(
    target: str,
    folder: Path,
    work: Path,
    rows: list[Row],
    teacher_options: TeacherOptions,
) -> dict[str, list[Any]]:
    """``head.measure`` a head's folder on text; all rows are used.

    Raises:
        HeadError: the folder holds no head, or one for another target.
    """
    head = load_head(folder)
    model = load_target(target)
    size = model.get_output_embeddings().weight.shape[1]
    if head.config.hidden_size != size:
        raise HeadError(
            f"{folder} is for hidden states of {head.config.hidden_size}, those of"
            f" {target} have {size}: pass the target that it was trained for"
        )
    cache = cached_teacher(model, target, rows, work, teacher_options, Console())
    head = head.to(model.device)
    head.share(
        model.get_input_embeddings().weight, model.get_output_embeddings().weight
    )
    return evaluate_head(head, cache)
