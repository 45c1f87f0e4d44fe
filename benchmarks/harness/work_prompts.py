"""Prompts of the workload table: chat, code, mathematics, editing, reading."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from vllm_treespec.tools.prompts import (
    PromptError,
    load_prompts,
    load_workloads,
    names_workloads,
    read_jsonl,
    spread,
)

# Longer prompts take long to read and leave the answer little of the time.
MAX_WORDS = 300

# MT-bench's categories that are not workloads of their own
CHAT_CATEGORIES = ("writing", "roleplay", "reasoning", "stem", "humanities")
# Self-instruct tasks whose answer stands in the given text, more or less in its words.
READING_TASKS = (
    *(f"seed_task_{n}" for n in (39, 64, 85, 98)),
    *(
        f"user_oriented_task_{n}"
        for n in (102, 157, 159, 160, 162, 175, 176, 179, 181, 191, 212, 213, 247)
    ),
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


def find_workloads(data: Path, names: list[str], count: int) -> dict[str, list[str]]:
    """Read ``count`` prompts of each named workload; all workloads if none is named.

    ``data`` is a folder with the public data sets' files, whose prompts are always
    shuffled in the same way, or a JSONL file whose rows hold ``workload`` and
    ``prompt``, in its order; or one of prompts alone, of which as many as there are
    are taken at even distances. PromptError names what is missing or too short.
    """
    if data.is_file() and not names and not names_workloads(data):
        return {"prompts": spread(load_prompts(data), count)}
    if data.is_dir():
        by_name: dict[str, Any] = BUILDERS
    elif data.is_file():
        by_name = load_workloads(data)
    else:
        raise PromptError(f"--data: there is no file or folder {data}")
    prompts = {}
    for name in names or by_name:
        if name not in by_name:
            raise PromptError(
                f"--workloads: {data} holds no workload {name!r}; it holds "
                f"{', '.join(by_name)}"
            )
        every = by_name[name](data) if data.is_dir() else by_name[name]
        short = [prompt for prompt in every if len(prompt.split()) <= MAX_WORDS]
        if data.is_dir():
            random.Random(0).shuffle(short)
        if len(short) < count:
            raise PromptError(
                f"{data} holds {len(short)} prompts of at most {MAX_WORDS} words for "
                f"the workload {name!r} and {count} are asked for; lower "
                "--batch-sizes, --waves or --num-prompts"
            )
        prompts[name] = short[:count]
    return prompts


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


def rows(path: Path) -> list[dict[str, Any]]:
    """Read a data set's file; PromptError names the file and the remedy."""
    try:
        return [row for _, row in read_jsonl(path)]
    except PromptError as error:
        raise PromptError(
            f"--data: {error}; put the file there, or choose other workloads with "
            "--workloads"
        ) from None
