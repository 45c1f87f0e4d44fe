"""Prompts for the demo and the benchmark, from any JSONL file."""

from __future__ import annotations

import gzip
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

from vllm_treespec.json_files import parse_json

SHIPPED = Path(__file__).parent / "prompts.jsonl"
SHIPPED_WORKLOADS = Path(__file__).parent / "workloads.jsonl"

Item = TypeVar("Item")


class PromptError(ValueError):
    """A prompt file that cannot be used; the message names the line."""


def load_prompts(path: Path) -> list[str]:
    """Read user prompts from a JSONL file.

    A line holds one object; the prompt stands under ``prompt``, ``question``,
    ``instruction`` or, for conversations, in the first of ``turns``.

    Raises:
        PromptError: naming the line that holds no prompt.

    """
    prompts = []
    for number, row in read_jsonl(path):
        prompt = _prompt_of(row)
        if not prompt:
            raise PromptError(
                f"{path} line {number} holds no prompt; write it as text under "
                "'prompt', 'question', 'instruction' or as first of 'turns'"
            )
        prompts.append(prompt)
    return prompts


def load_workloads(path: Path) -> dict[str, list[str]]:
    """Read user prompts by workload from a JSONL file, in the file's order.

    A line holds one object with text under ``workload`` and ``prompt``.

    Raises:
        PromptError: naming the line that lacks one of them.

    """
    found: dict[str, list[str]] = {}
    for number, row in read_jsonl(path):
        fields = row if isinstance(row, dict) else {}
        name, prompt = fields.get("workload"), fields.get("prompt")
        if not (isinstance(name, str) and name and isinstance(prompt, str) and prompt):
            raise PromptError(
                f"{path} line {number} lacks text under 'workload' or 'prompt'"
            )
        found.setdefault(name, []).append(prompt)
    return found


def names_workloads(path: Path) -> bool:
    """Tell whether a line of a JSONL file says what kind of work it is."""
    rows = [row for _, row in read_jsonl(path)]
    return any(isinstance(row, dict) and "workload" in row for row in rows)


def read_jsonl(path: Path) -> list[tuple[int, Any]]:
    """Read a JSONL file, compressed by gzip if its name ends in ``.gz``.

    Returns:
        lines with their numbers; there is at least one.

    Raises:
        PromptError: naming the file that is missing or empty, or the line.

    """
    if not path.is_file():
        raise PromptError(f"there is no file {path}")
    content = path.read_bytes()
    content = gzip.decompress(content) if path.suffix == ".gz" else content
    rows = []
    for number, line in enumerate(content.splitlines(), 1):
        if not line.strip():
            continue
        try:
            rows.append((number, parse_json(line)))
        except ValueError as error:
            raise PromptError(f"{path} line {number} is not JSON: {error}") from None
    if not rows:
        raise PromptError(f"{path} holds no prompts; write one JSON object a line")
    return rows


def _prompt_of(row: Any) -> str | None:
    if not isinstance(row, dict):
        return None
    turns = row.get("turns")
    first_turn = turns[0] if isinstance(turns, list) and turns else None
    candidates = (row.get("prompt"), row.get("question"), first_turn)
    for value in (*candidates, row.get("instruction")):
        if isinstance(value, str) and value.strip():
            return value
    return None


def chat_tokens(tokenizer: Any, prompt: str) -> list[int]:
    """Tokens of a conversation that asks for an answer to the prompt."""
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": prompt}],
        add_generation_prompt=True,
        tokenize=False,
    )
    ids: list[int] = tokenizer(text, add_special_tokens=False).input_ids
    return ids


def spread(items: Sequence[Item], count: int) -> list[Item]:
    """Take ``count`` items at even distances, so that every part is represented."""
    count = min(count, len(items))
    return [items[i * len(items) // count] for i in range(count)]
