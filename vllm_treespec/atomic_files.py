"""Writes files so that neither a kill nor a power cut leaves half of one."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def replaced(path: Path) -> Iterator[Path]:
    """Give a file to write, which takes the place of ``path`` once it is on the disk.

    An error leaves ``path`` as it was.
    """
    part = path.with_name(f"{path.name}.part")
    try:
        yield part
        sync(part)
        os.replace(part, path)
    finally:
        with suppress(FileNotFoundError):
            os.unlink(part)
    sync(path.parent)


@contextmanager
def atomic_writes(folder: Path) -> Iterator[Path]:
    """Give a folder to write in; its files move into ``folder`` once on the disk.

    A kill leaves each file of ``folder`` whole: as it was, or as written now. An error
    leaves ``folder`` as it was; one that did not exist is not made.
    """
    is_new = not folder.exists()
    partial = folder / "partial"
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir(parents=True)
        yield partial
        for path in partial.rglob("*"):
            sync(path)
        for path in partial.iterdir():
            path.replace(folder / path.name)
        partial.rmdir()
    except BaseException:
        shutil.rmtree(folder if is_new else partial, ignore_errors=True)
        raise
    sync(folder)
    sync(folder.parent)


def sync(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
