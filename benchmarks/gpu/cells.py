"""Finished cells in an output folder, so that broken-off work goes on."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar

from benchmarks.tasks import Finished, read_runs, store


class StoredCell(Finished):
    """A measured cell; subclasses hold what was measured, and where."""

    name: str


Cell = TypeVar("Cell", bound=StoredCell)


def settings_of(*told: Any) -> str:
    """Tell cells of other settings apart, by all that decides a result."""
    text = json.dumps(told, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


class CellFolder(Generic[Cell]):
    """The cells of one benchmark, one file each."""

    def __init__(self, folder: Path, kind: type[Cell], settings: str | None) -> None:
        """Take the output folder.

        Args:
            folder: holds the cells in ``cells``.
            kind: of the cells.
            settings: what cells must have been made with; None: any, but alike.

        """
        self.folder = folder / "cells"
        self.kind = kind
        self.settings = settings

    def file(self, name: str) -> Path:
        """File of a cell."""
        return self.folder / f"{name}.json"

    def missing(self, names: Iterable[str]) -> list[str]:
        """Names of the cells that are not finished."""
        return [name for name in names if not self.file(name).is_file()]

    def add(self, cell: Cell) -> None:
        """Store a finished cell."""
        store(self.file(cell.name), cell)

    def read(self) -> list[Cell]:
        """Read all finished cells.

        Raises:
            ValueError: when they were made with different settings.

        """
        paths = sorted(self.folder.glob("*.json"))
        wanted = self.settings
        if wanted is None and paths:
            wanted = self.kind.model_validate_json(paths[0].read_text()).settings
        return read_runs(paths, self.kind, lambda _: str(wanted))


def write_json(
    path: Path, origin: dict[str, Any], cells: Sequence[StoredCell], **more: Any
) -> None:
    """Write all cells with their provenance into one JSON file."""
    commits = sorted({str(cell.commit) for cell in cells})
    content = {
        "provenance": {**origin, "commits": commits},
        **more,
        "cells": [cell.model_dump(mode="json") for cell in cells],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
