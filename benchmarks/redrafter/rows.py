"""Numbers of the tables and figures from finished cells."""

from __future__ import annotations

import itertools
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from benchmarks.harness.plan import StoredCell
from benchmarks.harness.rescoring import Scores, name_of
from benchmarks.harness.rows import standard_error
from benchmarks.redrafter.parts import TABLES, TRACED, Entry
from vllm_treespec.tools.sides import PLAIN, Acceptance, Cell

# How many stretches of equal length figure 5a divides an answer into.
FIGURE5_STRETCHES = 4
# A mean with its standard error.
Mean = dict[str, float]
Row = dict[str, Any]


class Evidence:
    """Finished cells by side, name and round, and the scores of their answers."""

    def __init__(self, measured: Sequence[StoredCell], scores: Scores) -> None:
        """Take finished cells, and log-likelihoods by the name of the cell."""
        self.scores = scores
        self.cells: dict[tuple[str, str], dict[int, StoredCell]] = {}
        for stored in measured:
            key = (stored.side.name, stored.result.cell.name)
            self.cells.setdefault(key, {})[stored.round] = stored

    def rows(self, entries: Sequence[Entry]) -> dict[str, list[Row]]:
        """Rows of the tables and of figure 6, and those of figures 5a and 5b."""
        done = [entry for entry in entries if entry.key in self.cells]
        traced = [self.figure5(e) for e in done if e.cell.measure == TRACED]
        return {
            "rows": [self.row(entry) for entry in done if entry.cell.measure != TRACED],
            "stretches": [row for stretches, _ in traced for row in stretches],
            "compressions": [compression for _, compression in traced],
        }

    def row(self, entry: Entry) -> Row:
        """Pool the rounds of an entry; ``greedy`` is plain, one request at a time."""
        cell, stored = entry.cell, self.cells[entry.key]
        greedy = plain_of(cell, temperature=0.0, batch_size=1)
        speeds = {round_: speed(one) for round_, one in stored.items()}
        counts = [one.result.acceptance for one in stored.values()]
        total = Acceptance.total(count for count in counts if count)
        quality = self.qualities(entry.key) if entry.part in TABLES else []
        pairs = zip(quality, self.qualities(greedy), strict=False)
        steps, drafts = None, None
        if total.trees:
            steps = {"mean": total.length, "error": standard_error(total)}
            drafts = total.nodes / total.trees - 1
        return {
            "part": entry.part,
            "label": entry.label,
            "side": entry.side,
            "temperature": cell.temperature,
            "batch_size": cell.batch_size,
            "rounds": len(speeds),
            "num_tokens": sum(sum(one.result.num_tokens) for one in stored.values()),
            "tokens_per_s": statistics.median(speeds.values()),
            "tokens_per_s_min": min(speeds.values()),
            "tokens_per_s_max": max(speeds.values()),
            "speedup": self.ratio(speeds, plain_of(cell)),
            "speedup_over_greedy": self.ratio(speeds, greedy),
            "tokens_per_step": steps,
            "mean_drafts": drafts,
            "quality": mean_of(quality),
            "quality_gain": mean_of([mine - plain for mine, plain in pairs]),
        }

    def ratio(self, speeds: Mapping[int, float], plain: tuple[str, str]) -> Any:
        """Median over the rounds of the speed against plain decoding's, or None."""
        base = self.cells.get(plain, {})
        ratios = [speeds[r] / speed(base[r]) for r in speeds if r in base]
        return statistics.median(ratios) if ratios else None

    def qualities(self, key: tuple[str, str]) -> list[float]:
        """Mean log-likelihood of each prompt's answers over the scored rounds."""
        names = map(name_of, self.cells.get(key, {}).values())
        rounds = [self.scores[name] for name in names if name in self.scores]
        return [statistics.fmean(values) for values in zip(*rounds, strict=True)]

    def figure5(self, entry: Entry) -> tuple[list[Row], Row]:
        """Stretches of figure 5a and the point of figure 5b."""
        details = [one.result.details for one in self.cells[entry.key].values()]
        answers = [answer for one in details for answer in one["step_tokens"]]
        counts: Counter[int] = Counter()
        for one in details:
            for nodes, trees in one["node_counts"].items():
                counts[int(nodes) - 1] += trees
        return stretches_of(entry.cell, answers), compression_of(entry.cell, counts)


def speed(stored: StoredCell) -> float:
    """Tokens per second of all requests together."""
    return sum(stored.result.num_tokens) / stored.result.seconds


def plain_of(cell: Cell, **changed: float) -> tuple[str, str]:
    """Key of plain decoding at a cell's temperature and batch size, or as changed."""
    plain = {"tree": None, "measure": "", **changed}
    return PLAIN, cell.model_copy(update=plain).name


def mean_of(values: Sequence[float]) -> Mean | None:
    """Mean and standard error, values taken as independent; one value has error 0."""
    if not values:
        return None
    spread = statistics.stdev(values) if len(values) > 1 else 0.0
    return {"mean": statistics.fmean(values), "error": spread / len(values) ** 0.5}


def stretches_of(cell: Cell, answers: Sequence[Sequence[int]]) -> list[Row]:
    """Tokens per step by where in the answer the step begins, of tokens by step.

    The first token comes from the prompt, the end may cut off the last step: left out.
    """
    assert cell.tree is not None
    assert cell.max_tokens is not None
    size = -(-cell.max_tokens // FIGURE5_STRETCHES)
    emitted: list[list[float]] = [[] for _ in range(FIGURE5_STRETCHES)]
    for steps in answers:
        begins = itertools.accumulate(steps)
        for position, tokens in zip(begins, steps[1:-1], strict=False):
            emitted[position // size].append(float(tokens))
    return [
        {
            "beam_width": cell.tree["beam_width"],
            "first": index * size + 1,
            "last": min((index + 1) * size, cell.max_tokens),
            "num_steps": len(values),
            "tokens_per_step": mean_of(values),
        }
        for index, values in enumerate(emitted)
        if values
    ]


def compression_of(cell: Cell, counts: Counter[int]) -> Row:
    """Draft tokens to verify with tree attention, of trees by number of drafts."""
    assert cell.tree is not None
    width, length = cell.tree["beam_width"], cell.tree["length"]
    drafts = np.repeat(list(counts), list(counts.values()))
    low, high = np.percentile(drafts, [1, 99], method="inverted_cdf")
    return {
        "beam_width": width,
        "length": length,
        # without tree attention
        "num_candidates": width * length,
        "num_trees": counts.total(),
        "mean": float(drafts.mean()),
        "low": int(low),
        "high": int(high),
    }
