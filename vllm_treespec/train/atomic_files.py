"""Writes and reads files so that a killed run leaves no half-written one."""

import json
import shutil
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from safetensors import SafetensorError, safe_open
from transformers.trainer_utils import get_last_checkpoint

# What the Trainer reads to go on, in the order in which it writes them.
_CHECKPOINT_FILES = (
    "model.safetensors",
    "optimizer.pt",
    "scheduler.pt",
    "rng_state.pth",
    "trainer_state.json",
)


@contextmanager
def atomic_writes(folder: Path) -> Iterator[Path]:
    """Give a folder to write files in, which move into ``folder`` at the end.

    So a kill leaves each file of ``folder`` whole: as it was, or as written now.
    """
    partial = folder / "partial"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    yield partial
    for path in partial.iterdir():
        path.replace(folder / path.name)
    partial.rmdir()


def newest_complete_checkpoint(folder: Path) -> str | None:
    """Return the newest checkpoint that can be read, None without one.

    Newer ones, which a kill left half written, are removed and named on the console.
    """
    removed: list[tuple[str, str]] = []
    while (last := get_last_checkpoint(str(folder))) is not None:
        broken = _broken_file(Path(last))
        if broken is None:
            break
        shutil.rmtree(last)
        removed.append((last, broken))
    start = Path(last).name if last else "the start"
    for checkpoint, broken in removed:
        Console().print(
            f"{checkpoint} is incomplete ({broken} is missing or cut short): removed,"
            f" training goes on from {start}",
            soft_wrap=True,
        )
    return last


def _broken_file(checkpoint: Path) -> str | None:
    """Name the first file that is missing or cut short."""
    for name in _CHECKPOINT_FILES:
        if not _is_complete(checkpoint / name):
            return name
    return None


def _is_complete(path: Path) -> bool:
    """Whether a file ends where its format says."""
    if path.suffix in (".pt", ".pth"):
        # A file of torch.save is a zip archive, whose directory comes last.
        return zipfile.is_zipfile(path)
    try:
        if path.suffix == ".json":
            json.loads(path.read_text())
        else:
            with safe_open(path, "pt"):
                pass
    except (FileNotFoundError, SafetensorError, json.JSONDecodeError):
        return False
    return True
