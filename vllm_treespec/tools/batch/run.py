"""A whole batch: what is not in the journal is answered, then the files are written."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vllm_treespec.tools.batch.files import (
    check_kind,
    check_rows,
    fingerprint,
    read_rows,
    write_answers,
    write_lines,
)
from vllm_treespec.tools.batch.journal import Journal
from vllm_treespec.tools.batch.rows import (
    Answer,
    BadRow,
    BatchError,
    Columns,
    Finished,
    Row,
    Summary,
)

BAD_ROWS = ".bad.jsonl"
INPUT_OPTION = "the content of INPUT (SHA-256)"

# Takes rows and gives them back finished, in any order and in groups of any size. It
# asks for a row when it has room for it, and for none before the first is wanted.
Answerer = Callable[[Iterator[Row]], Iterator[list[Finished]]]


@dataclass(frozen=True)
class Settings:
    """A batch."""

    input: Path
    output: Path
    # all that decides what the answers are; compared with those of the first start
    options: dict[str, Any]
    columns: Columns = field(default_factory=Columns)
    # the first so many rows; None: all
    limit: int | None = None

    @property
    def journal(self) -> Path:
        """Where finished rows are kept until the batch is finished."""
        return self.output.with_name(f"{self.output.name}.journal")

    @property
    def bad_rows(self) -> Path:
        """Where bad rows are reported."""
        return self.output.with_name(f"{self.output.name}{BAD_ROWS}")


@dataclass
class Progress:
    """How far a batch is."""

    total: int
    finished: int
    bad: int
    # of the rows that this process has finished
    tokens: int = 0


def run_batch(
    settings: Settings, answer: Answerer, show: Callable[[Progress], None]
) -> Summary:
    """Answer each row once, as far as no earlier start did, and write the files.

    ``show`` is called when the batch starts and whenever rows are finished.

    Raises:
        BatchError: the files do not fit together, another process runs this batch, or
            no row could be answered.

    """
    check_files(settings)
    digest, total = fingerprint(settings.input)
    options = {INPUT_OPTION: digest, **settings.options}
    with Journal(settings.journal, options) as journal:
        if journal.header.finished is not None:
            return finished_before(settings, journal.header.finished)
        rows = Rows(settings, journal)
        total = total if settings.limit is None else min(total, settings.limit)
        progress = Progress(total, len(journal.offsets), len(journal.bad))
        show(progress)
        for records in answered(rows, answer):
            journal.append(records)
            progress.finished = len(journal.offsets)
            progress.bad = len(journal.bad)
            progress.tokens += sum(
                r.completion_tokens for r in records if isinstance(r, Answer)
            )
            show(progress)
        progress.total = len(rows.lines)
        show(progress)
        return publish(settings, journal, rows)


class Rows:
    """Reads the rows that no start has finished; keeps the bad ones apart."""

    def __init__(self, settings: Settings, journal: Journal) -> None:
        """Remember what to read."""
        self.settings = settings
        self.done = journal.offsets
        self.bad: list[Finished] = []
        # of all rows that were read
        self.lines: list[int] = []
        # whether a limit has left no rows out
        self.whole = False

    def open(self) -> Iterator[Row]:
        """Give the rows to answer."""
        found = read_rows(self.settings.input, self.settings.columns)
        for row in itertools.islice(found, self.settings.limit):
            self.lines.append(row.line)
            if row.line in self.done:
                continue
            if isinstance(row, BadRow):
                self.bad.append(row)
            else:
                yield row
        self.whole = next(found, None) is None

    def take_bad(self) -> list[Finished]:
        """Give the bad rows that were found since the last call."""
        bad, self.bad = self.bad, []
        return bad


def answered(rows: Rows, answer: Answerer) -> Iterator[list[Finished]]:
    """Give finished rows, good and bad; where all are finished, nothing is started."""
    still_open = rows.open()
    first = next(still_open, None)
    if first is not None:
        for records in answer(itertools.chain([first], still_open)):
            yield [*rows.take_bad(), *records]
    yield rows.take_bad()


def publish(settings: Settings, journal: Journal, rows: Rows) -> Summary:
    """Write OUTPUT and the bad rows, in the input's order; close the batch."""
    good = [line for line in rows.lines if line not in journal.bad]
    bad = [line for line in rows.lines if line in journal.bad]
    summary = Summary(answered=len(good), bad=len(bad))
    if len(journal.bad) == len(journal.offsets):
        refuse_all_bad(settings, journal, journal.read(bad))
    write_answers(settings.output, lambda: journal.read(good))
    if bad:
        write_lines(settings.bad_rows, journal.read(bad))
    else:
        settings.bad_rows.unlink(missing_ok=True)  # of a start with a larger limit
    if rows.whole:
        journal.finish(summary)
    return summary


def refuse_all_bad(
    settings: Settings, journal: Journal, bad: Iterator[Finished]
) -> None:
    """Refuse a batch without an answer; nothing of it is kept.

    Raises:
        BatchError: with the first row's reason.

    """
    first = next(bad, None)
    journal.remove()
    if first is None:
        raise BatchError(f"INPUT {settings.input} has no rows")
    assert isinstance(first, BadRow)
    raise BatchError(
        f"no row of INPUT {settings.input} could be answered, and nothing was written; "
        f"line {first.line}: {first.reason}"
    )


def check_files(settings: Settings) -> None:
    """Refuse files of other kinds, and an OUTPUT that no batch of ours has written.

    Raises:
        BatchError: naming the file and the remedy.

    """
    check_kind(settings.input, "INPUT")
    check_kind(settings.output, "OUTPUT")
    if not settings.output.parent.is_dir():
        raise BatchError(
            f"OUTPUT {settings.output}: there is no folder {settings.output.parent}; "
            f"make it"
        )
    check_rows(settings.input, settings.columns)
    if settings.output.name.endswith(BAD_ROWS):
        raise BatchError(
            f"OUTPUT {settings.output}: so end the names of files of bad rows; "
            f"name another OUTPUT"
        )
    if settings.journal.is_file() and settings.journal.stat().st_size:
        return
    for path in (settings.output, settings.bad_rows):
        if path.exists():
            raise BatchError(
                f"{path} exists, and no journal says that a batch wrote it; "
                f"move it away, or name another OUTPUT"
            )


def finished_before(settings: Settings, summary: Summary) -> Summary:
    """Say what a batch came to that an earlier start has finished.

    Raises:
        BatchError: its output is gone.

    """
    if not settings.output.exists():
        raise BatchError(
            f"{settings.journal} says that this batch is finished, but OUTPUT "
            f"{settings.output} is gone; to answer all rows again, remove "
            f"{settings.journal}"
        )
    return summary
