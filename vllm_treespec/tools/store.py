"""Finished work in files, so that a broken-off experiment goes on where it stopped."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel

from vllm_treespec.atomic_files import replaced


class Stored(BaseModel):
    """Finished work in the output folder."""

    # of everything that decides the result
    settings: str
    commit: str | None = None


Work = TypeVar("Work", bound=Stored)


def settings_of(*deciding: Any) -> str:
    """Shorten all that decides a result to a name that tells it from others."""
    text = json.dumps(deciding, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def store(path: Path, content: BaseModel) -> None:
    """Write a file that appears complete or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with replaced(path) as part:
        part.write_text(content.model_dump_json(), encoding="utf-8")


def read_stored(
    paths: Iterable[Path], kind: type[Work], settings: Callable[[Work], str]
) -> list[Work]:
    """Read finished work; ValueError when its settings are not those given for it."""
    found = []
    for path in paths:
        work = kind.model_validate_json(path.read_text(encoding="utf-8"))
        if work.settings != settings(work):
            raise ValueError(
                f"{path} was made with other settings; name another --out, or pass "
                "--fresh to measure all anew"
            )
        found.append(work)
    return found
