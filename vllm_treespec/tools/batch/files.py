"""Files of a batch: JSONL or Parquet, read row by row, replaced as a whole."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_treespec.atomic_files import replaced
from vllm_treespec.tools.batch.rows import (
    MESSAGES,
    BadRow,
    BatchError,
    Columns,
    Finished,
    Row,
    row_of,
    row_of_json,
)

if TYPE_CHECKING:
    import pyarrow as pa

PARQUET = ".parquet"
JSONL = (".jsonl", ".ndjson")
# Rows of a Parquet file that are in memory at once.
GROUP = 1024
CHUNK = 2**20


def check_kind(path: Path, name: str) -> None:
    """Refuse a file whose name ends in something we cannot read or write.

    Raises:
        BatchError: naming the file and the remedy.

    """
    if path.suffix == PARQUET:
        try:
            import pyarrow.parquet  # noqa: F401
        except ImportError:
            raise BatchError(
                f"{name} {path}: Parquet needs pyarrow; "
                "run pip install 'vllm-treespec[batch]'"
            ) from None
    elif path.suffix not in JSONL:
        kinds = ", ".join((*JSONL, PARQUET))
        raise BatchError(f"{name} {path}: its name must end in one of {kinds}")


def fingerprint(path: Path) -> tuple[str, int]:
    """SHA-256 of a file, and how many rows it has; blank lines count, too."""
    digest = hashlib.sha256()
    lines = 0
    last = b"\n"
    with path.open("rb") as stream:
        while chunk := stream.read(CHUNK):
            digest.update(chunk)
            lines += chunk.count(b"\n")
            last = chunk
    lines += not last.endswith(b"\n")
    if path.suffix == PARQUET:
        lines = _parquet_file(path).metadata.num_rows
    return digest.hexdigest(), lines


def read_rows(path: Path, columns: Columns) -> Iterator[Row | BadRow]:
    """Read a file's rows in order; blank lines are none."""
    if path.suffix == PARQUET:
        yield from _read_parquet(path, columns)
        return
    with path.open("rb") as stream:
        for line, raw in enumerate(stream, 1):
            if raw.strip():
                yield row_of_json(line, raw, columns)


def check_rows(path: Path, columns: Columns) -> None:
    """Refuse a Parquet file that has no prompts, or whose rows cannot be read.

    Raises:
        BatchError: naming the file, and the row group that is damaged.

    """
    if path.suffix != PARQUET:
        return
    there = _parquet_file(path).schema_arrow.names
    if columns.prompt not in there and MESSAGES not in there:
        raise BatchError(
            f"INPUT {path} has neither a column '{columns.prompt}' nor '{MESSAGES}'; "
            f"name the prompts' column with --prompt-column (there are: "
            f"{', '.join(there)})"
        )
    for _ in _batches(path, columns):
        pass


def _read_parquet(path: Path, columns: Columns) -> Iterator[Row | BadRow]:
    line = itertools.count(1)
    for batch in _batches(path, columns):
        for fields in batch.to_pylist():
            source = json.dumps(fields, default=str)
            yield row_of(next(line), fields, columns, source)


def _batches(path: Path, columns: Columns) -> Iterator[pa.RecordBatch]:
    """The columns that are read, some rows at a time."""
    import pyarrow as pa

    file = _parquet_file(path)
    wanted = [name for name in columns.names if name in file.schema_arrow.names]
    for group in range(file.num_row_groups):
        try:
            for batch in file.iter_batches(GROUP, [group], wanted):
                batch.validate(full=True)
                yield batch
        except (OSError, pa.ArrowException) as error:
            raise BatchError(
                f"INPUT {path}: row group {group} of {file.num_row_groups} is damaged "
                f"({error}); write the file again"
            ) from None


def _parquet_file(path: Path) -> Any:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        file = pq.ParquetFile(path)
        str(file.schema_arrow)  # decodes the names of columns
    except (OSError, UnicodeError, pa.ArrowException) as error:
        raise BatchError(f"INPUT {path} is no Parquet file: {error}") from None
    return file


def write_answers(path: Path, read: Callable[[], Iterator[Finished]]) -> None:
    """Write all answers, JSONL or Parquet as the name says, complete or not at all.

    ``read`` gives them in the order of the file, as often as it is called.
    """
    if path.suffix != PARQUET:
        write_lines(path, read())
        return
    whole_ids = all(isinstance(answer.id, int) for answer in read())
    with replaced(path) as part:
        _write_parquet(part, read(), whole_ids)


def write_lines(path: Path, records: Iterable[Finished]) -> None:
    """Write records as JSONL; the file appears only when it is complete."""
    with replaced(path) as part, part.open("w", encoding="utf-8") as stream:
        for record in records:
            stream.write(json.dumps(asdict(record), ensure_ascii=False) + "\n")


def _write_parquet(path: Path, answers: Iterator[Finished], whole_ids: bool) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    schema = answer_schema(whole_ids)
    records = (
        {**asdict(answer), "id": answer.id if whole_ids else str(answer.id)}
        for answer in answers
    )
    with pq.ParquetWriter(path, schema) as writer:
        while group := list(itertools.islice(records, GROUP)):
            writer.write_table(pa.Table.from_pylist(group, schema=schema))


def answer_schema(whole_ids: bool) -> pa.Schema:
    """Columns of a Parquet file with answers; ids are numbers if all of them are."""
    import pyarrow as pa

    return pa.schema(
        {
            "id": pa.int64() if whole_ids else pa.string(),
            "line": pa.int64(),
            "text": pa.string(),
            "finish_reason": pa.string(),
            "prompt_tokens": pa.int64(),
            "completion_tokens": pa.int64(),
        }.items()
    )
