"""Files that appear whole or not at all, and are on the disk when they do."""

import os
from pathlib import Path

import pytest

from vllm_treespec.atomic_files import atomic_writes, replaced
from vllm_treespec.tools.store import Stored, store


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of files that were synced or moved, in order."""
    made: list[str] = []
    sync, move = os.fsync, os.replace

    def synced(descriptor: int) -> None:
        made.append("sync " + Path(f"/proc/self/fd/{descriptor}").resolve().name)
        sync(descriptor)

    def moved(source: Path, target: Path) -> None:
        made.append(f"move {Path(target).name}")
        move(source, target)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "replace", moved)
    return made


def test_files_are_synced_before_they_are_moved(
    calls: list[str], tmp_path: Path
) -> None:
    """Red when a power cut can leave a file's new name without what it holds."""
    with replaced(tmp_path / "one.json") as part:
        part.write_text("1")
    wanted = ["sync one.json.part", "move one.json", f"sync {tmp_path.name}"]
    assert calls == wanted
    calls.clear()
    with atomic_writes(tmp_path / "new") as folder:
        (folder / "two").write_text("2")
    assert calls == ["sync two", "move two", "sync new", f"sync {tmp_path.name}"]
    assert (tmp_path / "new" / "two").read_text() == "2"
    calls.clear()
    store(tmp_path / "cell.json", Stored(settings="x"))
    assert calls[:2] == ["sync cell.json.part", "move cell.json"]


def fill(path: Path) -> None:
    """Fail when half of a file is written."""
    path.write_text("half")
    raise OSError("full")


def test_errors_leave_all_as_it_was(tmp_path: Path) -> None:
    """Red when an error leaves half a file, a new folder, or the partial one."""
    path = tmp_path / "file"
    path.write_text("before")
    with pytest.raises(OSError, match="full"), replaced(path) as part:
        fill(part)
    new, old = tmp_path / "new", tmp_path / "old"
    old.mkdir()
    for folder in (new, old):
        with pytest.raises(OSError, match="full"), atomic_writes(folder) as partial:
            fill(partial / "file")
    assert sorted(tmp_path.iterdir()) == [path, old]
    assert not list(old.iterdir())
    assert path.read_text() == "before"
