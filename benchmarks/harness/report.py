"""Results as JSON, and the Markdown that is made from it.

``results.json`` holds all that tables and plots show. An experiment's ``render`` makes
``results.md`` and the plots from it, after a run and for the
command ``report``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from vllm_treespec.tools.store import Stored

Row = TypeVar("Row")
Content = dict[str, Any]
# The columns of a table: what a row shows, by heading.
Columns = Mapping[str, Callable[[Row], str]]


def table(headings: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """Write a table; all columns but the first are numbers."""
    rules = ["---"] + ["---:"] * (len(headings) - 1)
    return "\n".join(f"| {' | '.join(row)} |" for row in [headings, rules, *lines])


def table_of(rows: Sequence[Row], columns: Columns[Row]) -> str:
    """Write a line for each row."""
    lines = [[show(row) for show in columns.values()] for row in rows]
    return table(list(columns), lines)


def number(value: float | None, form: str) -> str:
    """Format a number that may be missing."""
    return "–" if value is None else form.format(value)


def column(key: str, form: str, *inside: str) -> Callable[[Any], str]:
    """Make a column: a value of the row, or of mappings in it, if it is there."""

    def show(row: Any) -> str:
        for name in inside:
            row = row[name]
        return number(row.get(key), form)

    return show


def spread(median: float, low: float, high: float, rounds: int = 2) -> str:
    """Write a median of rounds with its range, if there is one."""
    return f"{median:.1f}" + (f" ({low:.1f}–{high:.1f})" if rounds > 1 else "")


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
