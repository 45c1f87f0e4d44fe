"""Table rows from measured cells: medians over rounds, speed-ups over plain."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence

from pydantic import BaseModel

from vllm_treespec.batch.stats import STAGES
from vllm_treespec.tools.sides import PLAIN, Acceptance, Cell, CellResult, Side

# A speed-up below this is not worth a method.
MIN_SPEEDUP = 1.05


class Mode(BaseModel):
    """Steps that drafted with one tree, or with none."""

    steps: int
    # None where none of them only decoded
    tokens_per_s: float | None = None


class Row(BaseModel):
    """A table row: one side in one cell, all rounds."""

    side: str
    family: str
    budget: int
    cell: Cell
    rounds: int
    num_tokens: int
    # tokens per second of each round
    speeds: list[float] = []
    # median, lowest and highest over the rounds
    tokens_per_s: float
    tokens_per_s_min: float
    tokens_per_s_max: float
    tpot_ms: float | None
    # against the fastest plain side of this cell in the same round, the median over the
    # rounds; set by with_speedups
    speedup: float | None = None
    acceptance_length: float | None = None
    # [d - 1]: share of the trees of which at least d draft tokens were accepted
    acceptance_by_depth: list[float] = []
    mean_nodes: float | None = None
    # shares of the wall time, STAGES and "other", ours only
    stage_shares: dict[str, float] = {}
    # milliseconds per step, STAGES and parts of draft, ours only
    stage_ms: dict[str, float] = {}
    # what steps drafted with, a tree's name or "plain", ours only
    modes: dict[str, Mode] = {}


def summarise(side: Side, results: Sequence[CellResult]) -> Row:
    """Make one table row of the rounds of a side in a cell."""
    speeds = [
        (sum(result.num_tokens) + result.unfinished_tokens) / result.seconds
        for result in results
    ]
    tpots = [
        statistics.fmean(known)
        for result in results
        if (known := [ms for ms in result.tpot_ms if ms is not None])
    ]
    row = Row(
        side=side.name,
        family=side.family,
        budget=side.budget,
        cell=results[0].cell,
        rounds=len(results),
        num_tokens=sum(sum(result.num_tokens) for result in results),
        speeds=speeds,
        tokens_per_s=statistics.median(speeds),
        tokens_per_s_min=min(speeds),
        tokens_per_s_max=max(speeds),
        tpot_ms=statistics.median(tpots) if tpots else None,
    )
    acceptance = Acceptance.total(r.acceptance for r in results if r.acceptance)
    if acceptance.trees:
        row.acceptance_length = acceptance.length
        row.acceptance_by_depth = [n / acceptance.trees for n in acceptance.at_least]
        row.mean_nodes = acceptance.nodes / acceptance.trees
    stages: Counter[str] = Counter()
    for result in results:
        stages.update(result.stage_seconds)
    if stages:
        seconds = sum(result.seconds for result in results)
        steps = sum(result.steps or 0 for result in results)
        shares = {name: stages[name] / seconds for name in STAGES}
        row.stage_shares = {**shares, "other": 1 - sum(shares.values())}
        names = dict.fromkeys((*STAGES, "draft_forward", *stages))
        row.stage_ms = {name: 1000 * stages[name] / max(steps, 1) for name in names}
    row.modes = modes_of(results)
    return row


def modes_of(results: Sequence[CellResult]) -> dict[str, Mode]:
    """How many steps drew each tree or none, and how fast these were."""
    steps: Counter[str] = Counter()
    seconds: Counter[str] = Counter()
    tokens: Counter[str] = Counter()
    for result in results:
        steps.update(result.mode_steps)
        seconds.update(result.mode_seconds)
        tokens.update(result.mode_tokens)
    return {
        name: Mode(
            steps=count,
            tokens_per_s=tokens[name] / seconds[name] if seconds[name] else None,
        )
        for name, count in steps.most_common()
    }


def with_speedups(rows: Sequence[Row]) -> list[Row]:
    """Set each row's speed-up against the fastest plain side of its cell.

    A machine's speed changes, so each round is compared with plain's of that round.
    """
    fastest: dict[str, Row] = {}
    for row in rows:
        if row.family == PLAIN:
            known = fastest.setdefault(row.cell.name, row)
            fastest[row.cell.name] = max(known, row, key=lambda r: r.tokens_per_s)
    return [
        row.model_copy(update={"speedup": speedup(row, fastest[row.cell.name])})
        if row.cell.name in fastest
        else row
        for row in rows
    ]


def speedup(row: Row, plain: Row) -> float:
    """Median over the rounds that both sides have; theirs come in the same order."""
    return statistics.median(
        own / other for own, other in zip(row.speeds, plain.speeds, strict=False)
    )
