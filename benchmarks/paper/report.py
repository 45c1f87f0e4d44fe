"""Markdown of the experiments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.markdown import table
from benchmarks.paper.law import Comparison, smallest_p_value
from benchmarks.paper.metrics import METRICS, Best, Row
from benchmarks.paper.plot import TITLES
from benchmarks.paper.references import TextScore
from benchmarks.paper.statistics import Interval
from benchmarks.paper.trees import METHODS
from benchmarks.report import listing, number

HEADINGS = {
    "lengths": "Experiment 1: draft length",
    "budgets": "Experiment 2: target budget",
}
NOTES = (
    "Block efficiency: mean emitted tokens per target step of a drafting request, "
    "bonus included, ± standard error. MBSU: block efficiency / (L r + 1) with L the "
    "depth of the tree and r = draft parameters / target parameters. Both are 1 for "
    "plain decoding. Token rate: emitted tokens over wall time, prefill included, in "
    "tokens per second and relative to plain decoding at the same temperature. Best "
    "trees are chosen for each metric alone, as in the paper's figures, so the highest "
    "of several noisy values is somewhat too high. Three vectors of RSD-C that the "
    "appendix prints one level short of their budget fill it here."
)
LAW_NOTES = (
    "Mean log-likelihood per token of the answers under the target at temperature 1, "
    "mean over prompts, with a 95% interval. Both p-values come from permuting the "
    "labels within each prompt: of the difference of the mean log-likelihoods, and of "
    "the chi-square of the second to ninth token of the answers (no tree takes part in "
    "the first). Methods are pooled over their trees. The control compares two "
    "different laws and has to be noticed."
)


def markdown(
    rows: Sequence[Row],
    best: Sequence[Best],
    law: Sequence[Comparison],
    texts: Sequence[TextScore],
    failed: Mapping[str, str],
    origin: Mapping[str, Any],
) -> str:
    """Write best and full tables, the check of the law, and where it comes from."""
    parts = ["# The RSD paper's experiments", NOTES]
    for experiment in dict.fromkeys(point.experiment for point in best):
        here = [point for point in best if point.experiment == experiment]
        parts += [f"## {HEADINGS[experiment]}", *best_tables(here)]
    parts += ["## All trees", full_table(rows)]
    parts += ["## Is the output law the target's?", LAW_NOTES, law_table(law)]
    smallest = smallest_p_value(law)
    if smallest is not None:
        parts.append(
            "Smallest p-value times the number of tests, the control's left out: "
            f"{smallest:.3f}."
        )
    if texts:
        parts += ["## References", text_table(texts)]
    if failed:
        lines = [f"- {name}: {reason}" for name, reason in failed.items()]
        parts += ["## Failed", "\n".join(lines)]
    parts += ["## Provenance", listing(origin)]
    return "\n\n".join(parts) + "\n"


def best_tables(best: Sequence[Best]) -> list[str]:
    """One table per temperature and metric: methods by sizes."""
    found = []
    for temperature in sorted({point.temperature for point in best}):
        here = [point for point in best if point.temperature == temperature]
        sizes = sorted({point.size for point in here})
        for metric in METRICS:
            cells = {(p.method, p.size): p for p in here if p.metric == metric}
            lines = [
                [method, *(best_cell(cells.get((method, size))) for size in sizes)]
                for method in METHODS
            ]
            title = f"{TITLES[metric]}, temperature {temperature:g}"
            found.append(table([title, *map(str, sizes)], lines))
    return found


def best_cell(point: Best | None) -> str:
    """Write a value and its tree."""
    if point is None:
        return "–"
    return f"{point.value:.3f} ({point.tree.removeprefix(point.method + '-')})"


def full_table(rows: Sequence[Row]) -> str:
    """Write every tree at every temperature."""
    headings = ["tree", "temperature", "L", "drafts", "tokens", "block efficiency"]
    headings += ["MBSU", "tokens/s", "tokens/s ÷ plain", "rounds"]
    lines = [
        [
            row.name,
            f"{row.temperature:g}",
            str(row.depth),
            str(row.num_drafts),
            str(row.num_tokens),
            f"{row.block_efficiency:.3f} ± {row.block_efficiency_error:.3f}",
            f"{row.mbsu:.3f}",
            f"{row.token_rate:.1f}",
            number(row.token_rate_ratio, "{:.3f}"),
            str(row.rounds),
        ]
        for row in sorted(rows, key=lambda row: row.temperature)
    ]
    return table(headings, lines)


def law_table(law: Sequence[Comparison]) -> str:
    """Write the comparisons."""
    headings = ["first, second", "answers", "mean of the first", "of the second"]
    headings += ["difference", "p", "p of the tokens"]
    lines = [
        [
            f"{'control: ' if c.control else ''}{c.first}; {c.second}",
            "{} {}".format(*c.num_answers),
            shown(c.first_mean),
            shown(c.second_mean),
            shown(c.difference.interval),
            f"{c.difference.p_value:.4f}",
            number(c.token_p_value, "{:.4f}"),
        ]
        for c in law
    ]
    return table(headings, lines)


def shown(interval: Interval) -> str:
    """Write a mean with its interval."""
    return f"{interval.mean:.3f} ({interval.low:.3f} to {interval.high:.3f})"


def text_table(texts: Sequence[TextScore]) -> str:
    """Write BLEU and ROUGE-2."""
    lines = [
        [
            f"{t.method}, temperature {t.temperature:g}",
            str(t.num_answers),
            f"{t.bleu:.2f}",
            f"{t.rouge_2:.2f}",
        ]
        for t in texts
    ]
    return table(["answers of", "answers", "BLEU", "ROUGE-2"], lines)
