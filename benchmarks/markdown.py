"""Tables in Markdown."""

from __future__ import annotations

from collections.abc import Sequence


def table(headings: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """Write a table; all columns but the first are numbers."""
    rules = ["---"] + ["---:"] * (len(headings) - 1)
    return "\n".join(f"| {' | '.join(row)} |" for row in [headings, rules, *lines])
