"""The package's folders stand in one order: each imports only folders below it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "vllm_treespec"
# From the ground up.
FLOORS = (
    *("trees", "sampling", "batch", "scorers", "kernels", "layouts", "sources"),
    *("heads", "schedule", "proposers", "config", "step"),
    *("engine", "tools", "train", "testing"),
)


def imported_folders(file: Path) -> Iterator[str]:
    """Folders of the package that a file imports from, also within functions."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            package, *path = node.module.split(".")
            if package == "vllm_treespec" and path:
                yield path[0]


def test_every_folder_has_a_floor() -> None:
    """Red when a folder is added and its place in the order is not said."""
    folders = {file.parent.name for file in PACKAGE.glob("*/__init__.py")}
    assert folders == {*FLOORS}


def test_imports_point_down() -> None:
    """Red when two folders import each other, or a lower one a higher one."""
    for folder in FLOORS:
        above = FLOORS[1 + FLOORS.index(folder) :]
        for file in (PACKAGE / folder).rglob("*.py"):
            assert not {*imported_folders(file)} & {*above}, file
