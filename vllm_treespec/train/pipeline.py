"""Text, teacher, training, folder: the stages of every kind; each can be resumed."""

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
from vllm_treespec.heads import read_head_config
from vllm_treespec.train.distill import datasets, run_training
from vllm_treespec.train.drafter import Drafter
from vllm_treespec.train.kinds import KINDS, Kind
from vllm_treespec.train.options import DistillOptions, RunOptions, Shape
from vllm_treespec.train.plot import plot_history
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


def train_drafter(
    kind: Kind, run: RunOptions, shape: Shape, options: DistillOptions
) -> dict[str, Any]:
    """Train a drafter, from whatever an interrupted run left.

    OUT gets config.json, model.safetensors and training.json (everything needed to
    judge and repeat the run); WORK text and shards.

    Returns:
        What training.json holds.

    Raises:
        ValueError: text, target and options do not fit, or the weights are larger than
            ``run.max_mb``.
    """
    rows = collect_text(run, TextOptions(num_tokens=run.text_tokens, seed=options.seed))
    run.out.mkdir(parents=True, exist_ok=True)
    target = load_target(run.target)
    drafter: Drafter = kind.drafter.plan(shape, options, run.hot_tokens or None, target)
    teacher = TeacherOptions(run.top_k, run.seq_len, layers=drafter.layers)
    cache = cached_teacher(target, run, rows, teacher)
    torch.manual_seed(options.seed)
    drafter.start(target, cache.statistics)
    del target
    trained = [p.numel() for p in drafter.model.parameters() if p.requires_grad]
    Console().print(f"{kind.name}: {sum(trained) / 1e6:.1f} M parameters")
    train_set, eval_set = datasets(drafter, cache)
    result = run_training(drafter, train_set, eval_set, run.place(kind.checkpoints))
    history = result.pop("history")
    plot_history(history, run.place(kind.curves))
    found = drafter.record(eval_set)
    result["size_mb"] = round(save_drafter(drafter, run.out, run.max_mb), 2)
    record = {
        "target": run.target,
        "conversations": len(rows),
        "answer_positions": len(cache.rest),
        "result": result,
        **found,
        "teacher": asdict(teacher),
        "versions": {name: version(name) for name in ("torch", "transformers")},
        "evaluations": [log for log in history if "eval_kl" in log],
    }
    with replaced(run.out / "training.json") as part:
        part.write_text(json.dumps(record, indent=2) + "\n")
    return record


def evaluate_head(run: RunOptions) -> dict[str, list[Any]]:
    """``HeadDrafter.measure`` the head in OUT on all of a text.

    Raises:
        HeadError: OUT holds no head, or one for another target.
    """
    rows = collect_text(run, TextOptions())
    kind = KINDS[read_head_config(run.out).method]
    target = load_target(run.target)
    drafter = kind.drafter.of_folder(run.out, kind.options(), target)
    teacher = TeacherOptions(run.top_k, run.seq_len, layers=drafter.layers)
    cache = cached_teacher(target, run, rows, teacher)
    data = drafter.batches(cache, list(range(cache.num_rows)))
    found: dict[str, list[Any]] = drafter.measure(data)
    return found


def collect_text(run: RunOptions, options: TextOptions) -> list[Row]:
    """Stage 1: read the text files, or let the target write ``WORK/text.jsonl``.

    Raises:
        ValueError: there are no rows, or one cannot be trained on.
    """
    path = run.place("WORK/text.jsonl")
    path.parent.mkdir(parents=True, exist_ok=True)
    config = read_config("--target", run.target, AutoConfig.from_pretrained)
    size = config.get_text_config().vocab_size
    if not run.text:
        files = run.prompts or []
        questions = [prompt for file in files for prompt in read_prompts(file)]
        generate_text(run.target, questions, path, options, size)
    text = run.text or [path]
    rows = [row for file in text for row in read_rows(file, size)]
    if len(rows) < 2:
        raise ValueError(f"{text[0]}: at least 2 conversations are needed")
    return rows


def cached_teacher(
    target: PreTrainedModel, run: RunOptions, rows: list[Row], options: TeacherOptions
) -> TeacherCache:
    """Stage 2: the target's distributions over ``rows``, from ``WORK/teacher``."""
    Console().print(f"teacher: {len(rows)} conversations")
    folder = run.place("WORK/teacher")
    return load_cache(cache_teacher(target, run.target, rows, folder, options))


def save_drafter(drafter: Drafter, out: Path, max_mb: float | None) -> float:
    """Write the drafter's files; return the size of the weights in MB (10^6 bytes).

    Raises:
        ValueError: the weights are larger than ``max_mb``.
    """
    with atomic_writes(out) as partial:
        drafter.save(partial)
    path = out / "model.safetensors"
    size_mb = path.stat().st_size / 1e6
    if max_mb is not None and size_mb > max_mb:
        raise ValueError(
            f"{path} has {size_mb:.1f} MB, more than the {max_mb:g} MB allowed:"
            f" lower {drafter.lighter} or raise --max-mb"
        )
    return size_mb
