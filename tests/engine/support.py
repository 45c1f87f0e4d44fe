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

What vLLM's features do together with draft trees. Each row is a test: the table is
written from the one that `tests/engine/test_support_matrix.py` runs, by
`python -m tests.engine.support`.

* **drafts trees**: the request speculates.
* **decodes plainly**: the request gets no drafts and runs token by token, beside
  requests that do get drafts.
* **refused at start-up**: the engine does not start; one message names the argument or
  the model, and the remedy.
* **refused by vLLM**: vLLM answers such a request with an error whatever the kind of
  speculative decoding.

"Same answers as without trees" means greedy decoding in float32, token for token, in
batches that mix the rows. Nothing is ever ignored silently.
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
