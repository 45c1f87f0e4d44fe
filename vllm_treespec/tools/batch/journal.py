"""The journal of a batch: every finished row, appended and on the disk.

The first line holds the options, each further one a finished row. A line that is no
finished row, as a kill or a power cut leaves it, does not count: its row is answered
again. What a kill cut off at the end is removed when the journal is opened.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from vllm_treespec.atomic_files import replaced, sync
from vllm_treespec.json_files import parse_json
from vllm_treespec.tools.batch.rows import (
    BadRow,
    BatchError,
    Finished,
    Summary,
    finished_of,
)

MARK = b'{"treespec_batch"'


@dataclass(frozen=True)
class Header:
    """The first line of a journal."""

    # version of the form; its name marks a journal
    treespec_batch: int
    options: dict[str, Any]
    # what the whole batch came to, once it is finished
    finished: Summary | None = None


_HEADER = TypeAdapter(Header)


class Journal:
    """Finished rows by their line; one process at a time has it open."""

    def __init__(self, path: Path, options: dict[str, Any]) -> None:
        """Open the journal, or begin one; ``options`` decide what the answers are.

        Raises:
            BatchError: another process has it open, it was begun with other options,
                or the file is none of ours.

        """
        self.path = path
        # offsets of finished rows, by line
        self.offsets: dict[int, int] = {}
        # lines of the bad ones among them
        self.bad: set[int] = set()
        self.header = Header(1, json.loads(json.dumps(options)))
        self.file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
        try:
            self._lock()
            self._open()
        except BaseException:
            os.close(self.file)
            raise

    def __enter__(self) -> Journal:
        """Return the journal."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close it; that gives it free for other processes."""
        os.close(self.file)

    def append(self, records: Iterable[Finished]) -> None:
        """Add finished rows, and wait until they are on the disk."""
        lines = [(record, _line(record)) for record in records]
        if not lines:
            return
        offset = os.fstat(self.file).st_size
        self._write(b"".join(line for _, line in lines))
        for record, line in lines:
            assert record.line not in self.offsets, f"line {record.line} came twice"
            self._count(record, offset)
            offset += len(line)

    def read(self, lines: Iterable[int]) -> Iterator[Finished]:
        """Give the finished rows of these lines."""
        with open(self.file, "rb", closefd=False) as stream:
            for line in lines:
                stream.seek(self.offsets[line])
                yield finished_of(stream.readline())

    def finish(self, summary: Summary) -> None:
        """Keep of the journal only that the batch is finished."""
        with replaced(self.path) as part:
            part.write_bytes(_line(replace(self.header, finished=summary)))

    def remove(self) -> None:
        """Remove the journal."""
        self.path.unlink()

    def _lock(self) -> None:
        # Not flock: processes that an engine forks would keep that.
        try:
            fcntl.lockf(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            raise BatchError(
                f"another process writes to {self.path}; wait for it, or end it"
            ) from None

    def _open(self) -> None:
        """Read what is there, cut what is torn, and compare the options."""
        with open(self.file, "rb", closefd=False) as stream:
            first = stream.readline()
            if not first.endswith(b"\n"):
                if not (first.startswith(MARK) or MARK.startswith(first)):
                    raise self._foreign()
                self._begin()
                return
            begun = self._header_of(first)
            offset = len(first)
            for raw in stream:
                if not raw.endswith(b"\n"):
                    break
                self._count_line(raw, offset)
                offset += len(raw)
        if begun.options != self.header.options:
            if self.offsets or begun.finished:
                raise self._other_options(begun.options)
            self._begin()
        elif offset < os.fstat(self.file).st_size:
            os.ftruncate(self.file, offset)
            os.fsync(self.file)
        self.header = replace(self.header, finished=begun.finished)

    def _begin(self) -> None:
        """Write the first line; nothing that is there holds an answer."""
        os.ftruncate(self.file, 0)
        self._write(_line(self.header))
        sync(self.path.parent)

    def _header_of(self, first: bytes) -> Header:
        try:
            return _HEADER.validate_python(parse_json(first))
        except ValueError:
            raise self._foreign() from None

    def _other_options(self, begun: dict[str, Any]) -> BatchError:
        """Name the first option that is another one now."""
        options = self.header.options
        name = min(n for n in {*begun, *options} if begun.get(n) != options.get(n))
        was, now = _shown(begun.get(name)), _shown(options.get(name))
        return BatchError(
            f"{name} is {now}, and was {was} when this batch was begun; "
            f"give the same as before, or name another OUTPUT "
            f"(to start anew, remove OUTPUT and {self.path})"
        )

    def _foreign(self) -> BatchError:
        return BatchError(
            f"{self.path} is no journal of treespec batch; "
            f"remove it, or name another OUTPUT"
        )

    def _write(self, data: bytes) -> None:
        while data:
            data = data[os.write(self.file, data) :]
        os.fsync(self.file)

    def _count_line(self, raw: bytes, offset: int) -> None:
        """Count the finished row of a line, if it is one and the first of its line."""
        try:
            record = finished_of(raw)
        except ValueError:
            return
        if record.line not in self.offsets:
            self._count(record, offset)

    def _count(self, record: Finished, offset: int) -> None:
        self.offsets[record.line] = offset
        if isinstance(record, BadRow):
            self.bad.add(record.line)


def _line(record: Finished | Header) -> bytes:
    return json.dumps(asdict(record)).encode() + b"\n"


def _shown(value: Any) -> str:
    return "not given" if value is None else json.dumps(value)
