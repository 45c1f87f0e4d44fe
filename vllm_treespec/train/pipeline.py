"""The three stages in a row, each going on where a cut run left off."""

import json
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich.console import Console

from vllm_treespec.train.draft import DraftOptions, train_draft
from vllm_treespec.train.model import DraftShape, build_draft, save_draft
from vllm_treespec.train.plot import plot_history
from vllm_treespec.train.teacher import (
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
    prompts: list[Path],
    text: list[Path],
    options: TextOptions,
) -> list[Row]:
    """Stage 1: read ``text`` files, or let the target write ``work/text.jsonl``.

    Raises:
        ValueError: there are no rows.
    """
    if not text:
        questions = [prompt for path in prompts for prompt in read_prompts(path)]
        path = work / "text.jsonl"
        generate_text(target, questions, path, options)
        text = [path]
    rows = [row for path in text for row in read_rows(path)]
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
    max_mb: float | None = None,
) -> dict[str, Any]:
    """Stages 2 and 3: cache the target's distributions, train, write the draft model.

    ``out`` gets config.json, model.safetensors and training.json (everything needed to
    judge and repeat the run); ``out/work`` the shards, checkpoints and curves.png.

    Returns:
        What training.json holds.
    """
    console = Console()
    work = out / "work"
    model = load_target(target)
    console.print(f"teacher: {len(rows)} conversations")
    shards = cache_teacher(model, target, rows, work / "teacher", teacher_options)
    cache = load_cache(shards)
    draft = build_draft(model, shape, cache.statistics, draft_options.seed)
    del model
    console.print(f"draft: {draft.num_parameters() / 1e6:.1f} M parameters")
    result = train_draft(draft, cache, work / "draft", draft_options)
    history = result.pop("history")
    plot_history(history, work / "curves.png")
    size_mb = save_draft(draft, out, max_mb)
    record = {
        "target": target,
        "conversations": len(rows),
        "answer_positions": len(cache.rest),
        "result": {**result, "size_mb": round(size_mb, 2)},
        "shape": asdict(shape),
        "teacher": asdict(teacher_options),
        "draft": asdict(draft_options),
        "versions": {name: version(name) for name in ("torch", "transformers")},
        "evaluations": [log for log in history if "eval_kl" in log],
    }
    (out / "training.json").write_text(json.dumps(record, indent=2) + "\n")
    return record
