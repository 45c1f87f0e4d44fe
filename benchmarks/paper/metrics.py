"""Block efficiency, memory-bound speed-up and token rate (arXiv 2402.14160, D.2)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path

from pydantic import BaseModel
from safetensors import safe_open

from benchmarks.paper.experiments import Run, StoredRun
from benchmarks.paper.trees import Tree
from vllm_treespec.tools.sides import Acceptance

METRICS = ("block_efficiency", "mbsu", "token_rate_ratio")


class Row(BaseModel):
    """A tree, or plain decoding, at a temperature, all rounds.

    Block efficiency and memory-bound speed-up of plain decoding are 1, so both are also
    what they are relative to it.
    """

    name: str
    method: str
    temperature: float
    depth: int
    num_drafts: int
    rounds: int
    num_tokens: int
    # mean emitted tokens per target step of a drafting request, bonus included
    block_efficiency: float
    # standard error over the steps
    block_efficiency_error: float
    mbsu: float
    # tokens per second, all rounds together
    token_rate: float
    # against plain decoding at this temperature; None while that is missing
    token_rate_ratio: float | None = None


class Best(BaseModel):
    """The best tree of a method at a draft length or budget, by one metric."""

    experiment: str
    temperature: float
    method: str
    size: int
    metric: str
    value: float
    tree: str


def mbsu(block_efficiency: float, depth: int, size_ratio: float) -> float:
    """Memory-bound speed-up.

    The appendix says that the ratio is target size over draft size; its tables follow
    from draft size over target size, as here.

    Args:
        block_efficiency: mean emitted tokens per target step.
        depth: draft forwards per target step.
        size_ratio: parameters of the draft model over those of the target model.

    """
    return block_efficiency / (depth * size_ratio + 1)


def num_parameters(folder: str) -> int:
    """Count a model's parameters in its safetensors files, integers left out.

    Raises:
        ValueError: when the folder holds none.

    """
    files = sorted(Path(folder).glob("*.safetensors"))
    if not files:
        raise ValueError(f"{folder} holds no *.safetensors; name a model's folder")
    total = 0
    for file in files:
        with safe_open(file, framework="pt") as weights:
            for name in weights.keys():  # noqa: SIM118 (not a mapping)
                tensor = weights.get_slice(name)
                if tensor.get_dtype()[0] in ("I", "U"):
                    continue
                total += prod(tensor.get_shape())
    return total


def standard_error(acceptance: Acceptance) -> float:
    """Standard error of the acceptance length, steps taken as independent.

    Uses E[a] = sum P(a >= d) and E[a²] = sum (2 d - 1) P(a >= d) over depths d.
    """
    shares = [count / acceptance.trees for count in acceptance.at_least]
    mean = sum(shares)
    square = sum((2 * d - 1) * share for d, share in enumerate(shares, 1))
    return float((max(square - mean**2, 0.0) / acceptance.trees) ** 0.5)


def rows_of(runs: Sequence[StoredRun], size_ratio: float) -> list[Row]:
    """One row per tree and temperature, with token rates against plain decoding."""
    groups: dict[tuple[str, float], list[StoredRun]] = {}
    for stored in runs:
        key = (stored.run.side, stored.run.temperature)
        groups.setdefault(key, []).append(stored)
    rows = [row_of(group, size_ratio) for group in groups.values()]
    plain = {r.temperature: r.token_rate for r in rows if not r.num_drafts}
    for row in rows:
        if row.temperature in plain:
            row.token_rate_ratio = row.token_rate / plain[row.temperature]
    return rows


def row_of(group: Sequence[StoredRun], size_ratio: float) -> Row:
    """Pool the rounds of one tree at one temperature."""
    run: Run = group[0].run
    results = [stored.result for stored in group]
    acceptance = Acceptance.total(r.acceptance for r in results if r.acceptance)
    drafted = acceptance.trees > 0
    depth = run.tree.depth if run.tree else 0
    efficiency = acceptance.length if drafted else 1.0
    num_tokens = sum(sum(result.num_tokens) for result in results)
    return Row(
        name=run.side,
        method=run.method,
        temperature=run.temperature,
        depth=depth,
        num_drafts=run.tree.num_drafts if run.tree else 0,
        rounds=len(group),
        num_tokens=num_tokens,
        block_efficiency=efficiency,
        block_efficiency_error=standard_error(acceptance) if drafted else 0.0,
        mbsu=mbsu(efficiency, depth, size_ratio),
        token_rate=num_tokens / sum(result.seconds for result in results),
    )


def best_of(
    rows: Sequence[Row], experiment: str, trees: Mapping[int, Sequence[Tree]]
) -> list[Best]:
    """Best tree of each temperature, method and size by each metric, as the paper's
    figures show them."""
    found: dict[tuple[float, str, int, str], Best] = {}
    for size, size_trees in trees.items():
        names = {tree.name for tree in size_trees}
        for row in rows:
            for metric in METRICS:
                value: float | None = getattr(row, metric)
                if row.name not in names or value is None:
                    continue
                best = Best(
                    experiment=experiment,
                    temperature=row.temperature,
                    method=row.method,
                    size=size,
                    metric=metric,
                    value=value,
                    tree=row.name,
                )
                key = (row.temperature, row.method, size, metric)
                if key not in found or found[key].value < value:
                    found[key] = best
    return list(found.values())
