"""Prompts of the workload table: chat, code, mathematics, editing, reading."""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from vllm_treespec.tools import prompts

# Longer prompts take long to read and leave the answer little of the time.
MAX_WORDS = 300

# MT-bench's categories that are not workloads of their own
CHAT_CATEGORIES = ("writing", "roleplay", "reasoning", "stem", "humanities")
# Self-instruct tasks whose answer stands in the given text, more or less in its words.
READING_TASKS = (
    "seed_task_39",
    "seed_task_64",
    "seed_task_85",
    "seed_task_98",
    "user_oriented_task_102",
    "user_oriented_task_157",
    "user_oriented_task_159",
    "user_oriented_task_160",
    "user_oriented_task_162",
    "user_oriented_task_175",
    "user_oriented_task_176",
    "user_oriented_task_179",
    "user_oriented_task_181",
    "user_oriented_task_191",
    "user_oriented_task_212",
    "user_oriented_task_213",
    "user_oriented_task_247",
)
EDITS = (
    "Add type hints for all parameters, for the result and for the local variables of "
    "this function.",
    "Rename this function to `{name}_checked` and let it raise a ValueError with a "
    "clear message when an argument is None.",
    "Shorten the docstring of this function to one plain sentence and leave its code "
    "as it is.",
)

Item = TypeVar("Item")
Builder = Callable[[Path], list[str]]


class WorkloadError(ValueError):
    """Data that gives no prompts; the message names the file."""


def load_workloads(data: Path, names: list[str], count: int) -> dict[str, list[str]]:
    """Read the prompts of some workloads.

    Args:
        data: folder with the public data sets' files, or a JSONL file whose rows
            hold ``workload`` and ``prompt``.
        names: the workloads; empty: all.
        count: prompts of each.

    Returns:
        ``count`` prompts by workload. Those of a folder are shuffled, always in the
        same way, so that the first few stand for all; a file's order is kept.

    Raises:
        ValueError: naming the file or the workload that is missing or too short.

    """
    if data.is_dir():
        chosen = {
            name: from_folder(data, build)
            for name, build in choose(BUILDERS, names, data).items()
        }
    elif data.is_file():
        chosen = choose(from_file(data), names, data)
    else:
        raise WorkloadError(f"--workload-data: there is no file or folder {data}")
    for name, asked in chosen.items():
        if len(asked) < count:
            raise WorkloadError(
                f"{data} holds {len(asked)} prompts of at most {MAX_WORDS} words for "
                f"the workload {name!r} and {count} are asked for; lower --batch-sizes "
                "or --num-prompts"
            )
    return {name: asked[:count] for name, asked in chosen.items()}


def choose(found: dict[str, Item], names: list[str], data: Path) -> dict[str, Item]:
    """Keep the named workloads, all when none is named."""
    for name in names:
        if name not in found:
            known = ", ".join(found)
            raise WorkloadError(
                f"--workloads: {data} holds no workload {name!r}; it holds {known}"
            )
    return {name: found[name] for name in names or found}


def from_file(path: Path) -> dict[str, list[str]]:
    """Read the prompts of a JSONL file by workload, without long ones."""
    return {
        name: [prompt for prompt in asked if is_short(prompt)]
        for name, asked in prompts.load_workloads(path).items()
    }


def from_folder(folder: Path, build: Builder) -> list[str]:
    """Build a workload's prompts from the public data sets' files."""
    asked = [prompt for prompt in build(folder) if is_short(prompt)]
    random.Random(0).shuffle(asked)
    return asked


def chat(folder: Path) -> list[str]:
    """First questions of MT-bench's conversations, without code and the like."""
    return [
        row["turns"][0]
        for row in rows(folder / "mt_bench_question.jsonl")
        if row["category"] in CHAT_CATEGORIES
    ]


def code(folder: Path) -> list[str]:
    """Every other HumanEval problem: write the function."""
    return [
        "Write this Python function. Answer with the code only.\n\n"
        f"```python\n{row['prompt']}```"
        for row in human_eval(folder)[::2]
    ]


def mathematics(folder: Path) -> list[str]:
    """Word problems of GSM8K."""
    return [row["question"] for row in rows(folder / "gsm8k_train.jsonl")]


def editing(folder: Path) -> list[str]:
    """The other HumanEval problems, solved: return the function with a change."""
    asked = []
    for number, row in enumerate(human_eval(folder)[1::2]):
        edit = EDITS[number % len(EDITS)].format(name=row["entry_point"])
        function = row["prompt"] + row["canonical_solution"]
        asked.append(
            f"{edit} Answer with the code of the whole function only.\n\n"
            f"```python\n{function}```"
        )
    return asked


def reading(folder: Path) -> list[str]:
    """Self-instruct tasks that are answered from a given text."""
    tasks = {}
    for file in ("self_instruct_seed_tasks.jsonl", "self_instruct_user_oriented.jsonl"):
        tasks.update({row["id"]: row for row in rows(folder / file)})
    return [
        f"{tasks[name]['instances'][0]['input']}\n\n{tasks[name]['instruction']} "
        "Answer in full sentences and quote the words of the text where it suits."
        for name in READING_TASKS
        if name in tasks
    ]


BUILDERS: dict[str, Builder] = {
    "chat": chat,
    "code": code,
    "mathematics": mathematics,
    "editing": editing,
    "reading": reading,
}


def human_eval(folder: Path) -> list[dict[str, Any]]:
    """All HumanEval problems."""
    return rows(folder / "HumanEval.jsonl.gz")


def is_short(prompt: str) -> bool:
    """Tell prompts that are kept."""
    return len(prompt.split()) <= MAX_WORDS


def rows(path: Path) -> list[dict[str, Any]]:
    """Read a JSONL file, compressed by gzip or not.

    Raises:
        WorkloadError: naming the file that is missing, or its line that is no object.

    """
    if not path.is_file():
        raise WorkloadError(
            f"--workload-data: there is no {path}; put the file there, or choose other "
            "workloads with --workloads"
        )
    content = path.read_bytes()
    text = (gzip.decompress(content) if path.suffix == ".gz" else content).decode()
    found = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise WorkloadError(f"{path} line {number} is not JSON: {error}") from None
        if not isinstance(row, dict):
            raise WorkloadError(f"{path} line {number} is no JSON object")
        found.append(row)
    return found
