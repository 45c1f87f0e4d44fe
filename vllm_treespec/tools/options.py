"""How texts of options are read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

from vllm_treespec.json_files import parse_json

Number = TypeVar("Number", int, float)


def words(text: str, option: str = "", choices: Sequence[str] = ()) -> list[str]:
    """Read comma-separated words; ValueError for one that is not a choice."""
    found = [word.strip() for word in text.split(",") if word.strip()]
    for word in found:
        if choices and word not in choices:
            raise ValueError(
                f"{option}: there is no {word!r}; there are {', '.join(choices)}"
            )
    return found


def numbers(
    text: str, option: str, kind: type[Number], least: float = float("-inf")
) -> list[Number]:
    """Read comma-separated numbers; ValueError when there is none or one too small."""
    try:
        found = [kind(word) for word in words(text)]
    except ValueError:
        found = []
    if not found or min(found) < least:
        bound = f" from {least:g} on" if least > float("-inf") else ""
        raise ValueError(f"{option}: {text!r} is no list of numbers{bound}")
    return found


def json_object(text: str, option: str) -> dict[str, Any]:
    """Read one JSON object; ValueError names the option."""
    try:
        found = parse_json(text, finite=True)
    except ValueError as error:
        raise ValueError(f"{option} is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise ValueError(f'{option} must be one JSON object, such as {{"key": 1}}')
    return found
