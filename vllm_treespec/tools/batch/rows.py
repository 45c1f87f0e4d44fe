"""Rows of a batch: what comes in, what comes out, and why a row is bad."""

from __future__ import annotations

from codecs import BOM_UTF8
from dataclasses import dataclass
from typing import Any

from pydantic import TypeAdapter

from vllm_treespec.json_files import parse_json

# keys of a row whose names no option changes
MESSAGES = "messages"
SAMPLING_PARAMS = "sampling_params"
MAX_ID = 2**63 - 1

Id = str | int


class BatchError(ValueError):
    """A batch that cannot run; the message names what is wrong and the remedy."""


class RowError(ValueError):
    """A row that cannot be answered; the message is the reason."""


@dataclass(frozen=True)
class Columns:
    """Names of a row's keys that options choose."""

    prompt: str = "prompt"
    id: str = "id"

    @property
    def names(self) -> list[str]:
        """All keys that are read."""
        return [self.id, self.prompt, MESSAGES, SAMPLING_PARAMS]


@dataclass(frozen=True)
class Row:
    """A row to answer."""

    # of the input file, from 1; in Parquet files rows are counted
    line: int
    # from the id column; without one, the line
    id: Id
    # text, or a list of messages with "role" and "content"
    prompt: str | list[dict[str, Any]]
    sampling_params: dict[str, Any]
    # the row as it stands in the file
    source: str


@dataclass(frozen=True)
class Answer:
    """An answered row."""

    id: Id
    line: int
    text: str
    finish_reason: str
    prompt_tokens: int
    completion_tokens: int


@dataclass(frozen=True)
class BadRow:
    """A row that cannot be answered, and why."""

    id: Id
    line: int
    reason: str
    row: str


@dataclass(frozen=True)
class Summary:
    """What a batch came to."""

    answered: int
    bad: int


Finished = Answer | BadRow
_FINISHED: TypeAdapter[Finished] = TypeAdapter(Finished)


def finished_of(text: str | bytes) -> Finished:
    """Make a finished row of its JSON.

    Raises:
        ValueError: it is no JSON, or that of something else.

    """
    return _FINISHED.validate_python(parse_json(text), extra="forbid")


def bad_row(row: Row, reason: str) -> BadRow:
    """Say why a row that was read well cannot be answered.

    A reason that quotes half a character of the row's has it escaped: no file of text
    could hold it.
    """
    text = reason.encode(errors="backslashreplace").decode()
    return BadRow(row.id, row.line, text, row.source)


def row_of_json(line: int, raw: bytes, columns: Columns) -> Row | BadRow:
    """Make a row of a line of JSON."""
    source = raw.decode("utf-8", errors="backslashreplace").strip()
    try:
        fields = parse_json(raw.removeprefix(BOM_UTF8), finite=True)
    except ValueError as error:
        return BadRow(line, line, f"not JSON: {error}", source)
    if not isinstance(fields, dict):
        return BadRow(line, line, "not a JSON object", source)
    return row_of(line, fields, columns, source)


def row_of(
    line: int, fields: dict[str, Any], columns: Columns, source: str
) -> Row | BadRow:
    """Make a row of its fields; null counts as not given."""
    given = {
        name: fields[name] for name in columns.names if fields.get(name) is not None
    }
    row_id: Id = line
    try:
        row_id = _id_of(given.get(columns.id, line), columns)
        prompt = _prompt_of(given, columns)
        sampling_params = _sampling_params_of(given.get(SAMPLING_PARAMS, {}))
    except RowError as error:
        return BadRow(row_id, line, str(error), source)
    return Row(line, row_id, prompt, sampling_params, source)


def without_nulls(fields: dict[str, Any]) -> dict[str, Any]:
    """The fields that are given; a column of a Parquet file is there in every row."""
    return {name: value for name, value in fields.items() if value is not None}


def _id_of(value: Any, columns: Columns) -> Id:
    if isinstance(value, str) and _is_text(value):
        return value
    if isinstance(value, int) and not isinstance(value, bool):
        if -MAX_ID <= value <= MAX_ID:
            return value
        raise RowError(f"'{columns.id}' has more than 64 bits; write it as text")
    raise RowError(f"'{columns.id}' is neither text nor a whole number")


def _prompt_of(given: dict[str, Any], columns: Columns) -> str | list[dict[str, Any]]:
    prompt, messages = given.get(columns.prompt), given.get(MESSAGES)
    if prompt is None and messages is None:
        raise RowError(f"no prompt: neither '{columns.prompt}' nor '{MESSAGES}'")
    if prompt is not None and messages is not None:
        raise RowError(f"both '{columns.prompt}' and '{MESSAGES}'; keep one of them")
    if messages is None:
        if not isinstance(prompt, str):
            raise RowError(f"'{columns.prompt}' is not text")
        if not prompt or not _is_text(prompt):
            what = "holds half a character" if prompt else "is empty"
            raise RowError(f"no prompt: '{columns.prompt}' {what}")
        return prompt
    if not isinstance(messages, list) or not messages:
        raise RowError(f"'{MESSAGES}' is not a list of messages")
    if not all(isinstance(m, dict) and _has_role_and_content(m) for m in messages):
        raise RowError(f"'{MESSAGES}': each needs 'role' and 'content'")
    return [without_nulls(message) for message in messages]


def _has_role_and_content(message: dict[str, Any]) -> bool:
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str):
        return False
    return (isinstance(content, str) and _is_text(content)) or (
        isinstance(content, list) and all(isinstance(part, dict) for part in content)
    )


def _sampling_params_of(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise RowError(f"'{SAMPLING_PARAMS}' is not an object")
    return without_nulls(value)


def _is_text(text: str) -> bool:
    """Whether a text holds no halves of characters, which JSON can escape."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
