"""Block efficiency, memory-bound speed-up and token rate (arXiv 2402.14160, D.2)."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any

from benchmarks.harness.plan import StoredCell
from benchmarks.harness.rows import standard_error
from benchmarks.rsd.trees import tree_of, trees_of
from vllm_treespec.tools.sides import PLAIN, Acceptance

METRICS = ("block_efficiency", "mbsu", "token_rate_ratio")
Row = dict[str, Any]


def mbsu(block_efficiency: float, depth: int, size_ratio: float) -> float:
    """Memory-bound speed-up of trees that take ``depth`` draft forwards.

    The appendix says that the ratio is target size over draft size; its tables follow
    from draft size over target size, as here.
    """
    return block_efficiency / (depth * size_ratio + 1)


def rows_of(measured: Sequence[StoredCell], size_ratio: float) -> list[Row]:
    """One row per tree and temperature; the rounds of each come one after another."""
    by_cell = groupby(measured, lambda one: (one.side.name, one.result.cell.name))
    rows = [row_of(list(group), size_ratio) for _, group in by_cell]
    plain = {r["temperature"]: r["token_rate"] for r in rows if r["method"] == PLAIN}
    for row in rows:
        base = plain.get(row["temperature"])
        row["token_rate_ratio"] = row["token_rate"] / base if base else None
    return rows


def row_of(group: Sequence[StoredCell], size_ratio: float) -> Row:
    """Pool the rounds of one tree, or of plain decoding, at one temperature."""
    method, cell = group[0].side.family, group[0].result.cell
    tree = tree_of(method, cell.tree) if cell.tree else None
    depth = tree.depth if tree else 0
    results = [stored.result for stored in group]
    acceptance = Acceptance.total(r.acceptance for r in results if r.acceptance)
    num_tokens = sum(sum(result.num_tokens) for result in results)
    return {
        "name": tree.name if tree else PLAIN,
        "method": method,
        "temperature": cell.temperature,
        "depth": depth,
        "num_drafts": tree.num_drafts if tree else 0,
        "rounds": len(group),
        "num_tokens": num_tokens,
        # 1 for plain decoding, as is its memory-bound speed-up
        "block_efficiency": acceptance.length,
        "block_efficiency_error": standard_error(acceptance) if tree else 0.0,
        "mbsu": mbsu(acceptance.length, depth, size_ratio),
        "token_rate": num_tokens / sum(result.seconds for result in results),
    }


def best_of(rows: Sequence[Row], experiment: str) -> list[Row]:
    """Best tree by temperature, method, size and metric, as the paper's figures."""
    points = []
    for size, trees in trees_of(experiment).items():
        names = {tree.name for tree in trees}
        for metric in METRICS:
            held = [r for r in rows if r["name"] in names and r[metric] is not None]
            held.sort(key=lambda row: row[metric])
            best = {(row["temperature"], row["method"]): row for row in held}
            points += [
                {
                    "experiment": experiment,
                    "temperature": row["temperature"],
                    "method": row["method"],
                    "size": size,
                    "metric": metric,
                    "value": row[metric],
                    "tree": row["name"],
                }
                for row in best.values()
            ]
    return points
