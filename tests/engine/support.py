"""The support matrix: what each vLLM feature does with draft trees.

``python -m tests.engine.support`` writes it as ``docs/support-matrix.md``, and
``test_support_matrix.py`` runs every row.
"""

from __future__ import annotations

from pathlib import Path

from tests.engine.support_engines import ENGINE, MODELS
from tests.engine.support_requests import ANSWERS, GRAMMARS, SAMPLING

PAGE = Path(__file__).parents[2] / "docs" / "support-matrix.md"
SECTIONS = {
    "Sampling": SAMPLING,
    "Answers": ANSWERS,
    "Structured output": GRAMMARS,
    "Engine": ENGINE,
    "Models": MODELS,
}
ROWS = tuple(row for rows in SECTIONS.values() for row in rows)

INTRODUCTION = """# Support matrix

What each vLLM feature does together with draft trees. Nothing is ignored silently.

| outcome | meaning |
|---|---|
| **drafts trees** | the request speculates |
| **decodes plainly** | the request gets no drafts; others in its batch do |
| **refused at start-up** | the engine does not start; one message names the remedy |
| **refused by vLLM** | vLLM answers with an error, also without our package |
| **refused for the request** | the request gets an error, the engine goes on |

"Same answers as without trees": greedy decoding in float32 gives the same tokens, in
batches that mix the rows.

Each row is a test (`tests/engine/test_support_matrix.py`). This page is written from
these rows by `python -m tests.engine.support`.
"""


def page() -> str:
    """The support matrix in Markdown."""
    parts = [INTRODUCTION]
    for title, rows in SECTIONS.items():
        parts.append(f"\n## {title}\n")
        parts.append("| feature | with draft trees | tested by | note |")
        parts.append("|---|---|---|---|")
        parts += [
            f"| {r.feature} | {r.outcome.value} | {r.check.how} | {r.note} |"
            for r in rows
        ]
    return "\n".join(parts) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page())
