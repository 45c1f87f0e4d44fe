"""Results as JSON, and the Markdown that is made from it.

``results.json`` holds all that tables and plots show. An experiment's ``render`` makes
``results.md`` and the plots from it, after a run and for the
command ``report``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from string import Formatter
from typing import Any, TypeVar

from vllm_treespec.tools.store import Stored

Content = dict[str, Any]
Key = TypeVar("Key")
# The columns of a table by heading: a format of a row's values, or a function.
Columns = Mapping[str, str | Callable[[Any], str]]
MISSING = "–"


class ValuesOfRow(Formatter):
    """Formats keys of a mapping or attributes of an object; LookupError for None."""

    def get_value(self, key: int | str, args: Any, kwargs: Any) -> Any:
        """Look a name up in the row, which stands in place of the keywords."""
        name = str(key)
        return kwargs[name] if isinstance(kwargs, Mapping) else getattr(kwargs, name)

    def get_field(self, field_name: str, args: Any, kwargs: Any) -> Any:
        """Look up what may be missing inside, too."""
        try:
            found = super().get_field(field_name, args, kwargs)
        except TypeError:  # None holds nothing
            raise LookupError(field_name) from None
        if found[0] is None:
            raise LookupError(field_name)
        return found


VALUES = ValuesOfRow()


def written(row: Any, column: str | Callable[[Any], str]) -> str:
    """Write what a column shows of a row, or a dash if a value is missing."""
    if not isinstance(column, str):
        return column(row)
    try:
        return VALUES.vformat(column, (), row)
    except LookupError:
        return MISSING


def table(headings: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """Write a table; all columns but the first are numbers."""
    rules = ["---"] + ["---:"] * (len(headings) - 1)
    return "\n".join(f"| {' | '.join(row)} |" for row in [headings, rules, *lines])


def table_of(rows: Sequence[Any], columns: Columns) -> str:
    """Write a line for each row."""
    lines = [[written(row, show) for show in columns.values()] for row in rows]
    return table(list(columns), lines)


def grid(
    headings: Sequence[str],
    columns: Mapping[Key, str],
    cells: Mapping[tuple[tuple[str, ...], Key], str],
) -> str:
    """Write a line for each first half of the cells' keys.

    Args:
        headings: of what names a line.
        columns: headings of the second halves.
        cells: texts by line and column.

    """
    lines = [
        [*line, *(cells.get((line, column), MISSING) for column in columns)]
        for line in dict.fromkeys(line for line, _ in cells)
    ]
    return table([*headings, *columns.values()], lines)


def sections(tables: Mapping[str, tuple[Sequence[Any], Columns]]) -> list[str]:
    """Write a heading and a table for each that has rows."""
    return [
        f"## {title}\n\n{table_of(rows, columns)}"
        for title, (rows, columns) in tables.items()
        if rows
    ]


def listing(values: Mapping[str, Any]) -> str:
    """Write values as one line each."""
    return "\n".join(f"- {key}: {shown(value)}" for key, value in values.items())


def shown(value: Any) -> str:
    """Write nested values on one line."""
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {shown(v)}" for name, v in value.items())
    if isinstance(value, list):
        return " ".join(map(shown, value))
    return str(value)


def header(
    origin: Content, failed: Mapping[str, str], finished: Sequence[Stored]
) -> Content:
    """Begin results.json: where the results come from, and failures."""
    commits = sorted({str(work.commit) for work in finished})
    return {"provenance": {**origin, "commits": commits}, "failed": dict(failed)}


def write_markdown(
    out: Path, title: str, parts: Sequence[str], content: Content
) -> None:
    """Write results.md; failures and provenance of results.json come last."""
    end = ["How to read the tables: [benchmarks](../../README.md#what-is-measured)."]
    if content.get("failed"):
        end += ["## Failed", listing(content["failed"])]
    end += ["## Provenance", listing(content["provenance"])]
    text = "\n\n".join([f"# {title}", *parts, *end]) + "\n"
    (out / "results.md").write_text(text, encoding="utf-8")


def write_json(out: Path, content: Content) -> None:
    """Write results.json, one line for each entry of a list."""
    out.mkdir(parents=True, exist_ok=True)
    parts = []
    for key, value in content.items():
        if isinstance(value, list) and value:
            lines = ",\n  ".join(json.dumps(entry) for entry in value)
            parts.append(f"{json.dumps(key)}: [\n  {lines}\n ]")
        else:
            parts.append(f"{json.dumps(key)}: {json.dumps(value)}")
    (out / "results.json").write_text("{\n " + ",\n ".join(parts) + "\n}\n")


def read_json(out: Path) -> Content:
    """Read results.json; ValueError when there is none."""
    path = out / "results.json"
    if not path.is_file():
        raise ValueError(f"{out} holds no results.json")
    content: Content = json.loads(path.read_text(encoding="utf-8"))
    return content
