"""Which spec-config follows from what was measured."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vllm_treespec.tools.sides import PLAIN
from vllm_treespec.tools.tune.search import TreeRow

# A speed-up below this is noise.
LEAST = 1.02
# Below this a tree loses.
LOSES = 0.98
# Keys that are for measuring only.
NOT_FOR_USE = ("max_cached_tokens",)
# Keys of a schedule's entry beside those of its tree.
OF_SCHEDULE = ("batch_size", "min_acceptance_length")


@dataclass(frozen=True)
class Choice:
    """A spec-config and what it promises."""

    # name of the side; PLAIN when nothing pays
    side: str
    # None: no speculative_config
    spec: dict[str, Any] | None
    # geometric mean of the speed-ups over all loads, as measured with fixed trees
    speedup: float
    # loads under which the chosen trees lose; with any the schedule measures
    slower: tuple[str, ...] = ()


def choose(rows: Sequence[TreeRow], specs: Mapping[str, dict[str, Any]]) -> Choice:
    """Choose the method and its trees by batch size that are fastest over all loads.

    A method has one tree for each batch size, whatever the work and the temperature;
    loads for which it has none count as plain. Where one of these trees loses under
    some load, the spec-config names no schedule but the first tree, which is that of
    the smallest batch: the measured schedule tells such requests apart.
    ``specs`` are spec-configs without trees, by side.
    """
    best = Choice(PLAIN, None, 1.0)
    for side, spec in specs.items():
        own = [row for row in rows if row.side == side and row.speedup]
        entries, speedup = schedule_of(own)
        if entries and speedup > max(best.speedup, LEAST):
            used = {k: v for k, v in spec.items() if k not in NOT_FOR_USE}
            slower = losing_loads(own, entries)
            added = tree_of(entries[0]) if slower else {"schedule": entries}
            best = Choice(side, {**used, **added}, speedup, slower)
    return best


def losing_loads(
    rows: Sequence[TreeRow], entries: Sequence[dict[str, Any]]
) -> tuple[str, ...]:
    """Names of the loads under which the schedule's own tree is slower than plain."""
    chosen = {entry["batch_size"]: tree_of(entry) for entry in entries}
    return tuple(
        row.cell.name
        for row in rows
        if row.cell.batch_size in chosen
        and (row.tree or {}) == chosen[row.cell.batch_size]
        and row.speedup is not None
        and row.speedup < LOSES
    )


def tree_of(entry: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of a schedule's entry that shape its tree."""
    return {key: value for key, value in entry.items() if key not in OF_SCHEDULE}


def schedule_of(rows: Sequence[TreeRow]) -> tuple[list[dict[str, Any]], float]:
    """The best tree for each batch size of one side, and the mean speed-up.

    From the first batch size on for which no tree pays there are none. A tree is given
    up while it runs when it accepts less than where its speed-up would be 1.
    """
    entries: list[dict[str, Any]] = []
    speedups: list[float] = []
    pays = True
    for size in sorted({row.cell.batch_size for row in rows}):
        here = [row for row in rows if row.cell.batch_size == size]
        trees = {str(row.tree): row.tree for row in here}
        by_tree = {name: [r for r in here if str(r.tree) == name] for name in trees}
        means = {name: mean_of(found) for name, found in by_tree.items()}
        tree = max(means, key=means.__getitem__)
        pays = pays and means[tree] >= LEAST
        loads = len({row.cell.name for row in here})
        speedups += [means[tree] if pays else 1.0] * loads
        if pays:
            least = break_even(by_tree[tree])
            entry = {"batch_size": size, **(trees[tree] or {})}
            entries.append({**entry, "min_acceptance_length": least})
    return entries, geometric_mean(speedups)


def break_even(rows: Iterable[TreeRow]) -> float:
    """Acceptance length at which a tree is as fast as plain decoding."""
    found = [
        row.acceptance_length / row.speedup
        for row in rows
        if row.acceptance_length and row.speedup
    ]
    return max(1.0, round(geometric_mean(found), 2))


def mean_of(rows: Iterable[TreeRow]) -> float:
    """Geometric mean of the speed-ups."""
    return geometric_mean([row.speedup for row in rows if row.speedup])


def geometric_mean(values: Sequence[float]) -> float:
    """Of positive numbers; 1 of none."""
    if not values:
        return 1.0
    return math.exp(sum(map(math.log, values)) / len(values))


def best_by_work(rows: Sequence[TreeRow]) -> dict[str, TreeRow]:
    """The fastest row of each workload at the smallest batch size and temperature."""
    found: dict[str, TreeRow] = {}
    order = sorted(
        rows, key=lambda r: (r.cell.batch_size, r.cell.temperature, -(r.speedup or 0))
    )
    for row in order:
        found.setdefault(row.cell.workload, row)
    return found
