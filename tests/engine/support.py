"""The support matrix: what each vLLM feature does with draft trees.

``python -m tests.engine.support`` writes its tables into ``docs/support.md``, and
``test_support_matrix.py`` runs every row.
"""

from __future__ import annotations

from pathlib import Path

from tests.engine.support_checks import Row
from tests.engine.support_engines import ENGINE, MODELS
from tests.engine.support_requests import ANSWERS, GRAMMARS, SAMPLING

PAGE = Path(__file__).parents[2] / "docs" / "support.md"
BEGIN = "<!-- tables: python -m tests.engine.support writes them -->\n"
END = "<!-- end of the tables -->\n"
SECTIONS = {
    "Sampling": SAMPLING,
    "Answers": ANSWERS,
    "Structured output": GRAMMARS,
    "Engine": ENGINE,
    "Models": MODELS,
}
ROWS = tuple(row for rows in SECTIONS.values() for row in rows)


def table(rows: tuple[Row, ...]) -> str:
    """Rows in Markdown; those without a note share a line where all else is alike."""
    lines: dict[tuple[str, ...], list[str]] = {}
    for row in rows:
        unique = row.feature if row.note else ""
        key = (row.outcome.value, row.gpu, row.note, unique)
        lines.setdefault(key, []).append(row.feature)
    head = "| feature | on a CPU | on a GPU | note |\n|---|---|---|---|\n"
    return head + "".join(
        f"| {', '.join(features)} | {cpu} | {gpu} | {note} |\n"
        for (cpu, gpu, note, _), features in lines.items()
    )


def with_tables(text: str) -> str:
    """The page with the tables of today.

    Args:
        text: the page as it stands, with the lines ``BEGIN`` and ``END``.

    """
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    tables = "".join(
        f"\n### {title}\n\n{table(rows)}" for title, rows in SECTIONS.items()
    )
    return f"{before}{BEGIN}{tables}\n{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(with_tables(PAGE.read_text()))
