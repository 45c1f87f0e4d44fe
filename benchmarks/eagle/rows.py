"""The plain step's cost, from finished cells."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from benchmarks.eagle.parts import PLAIN_STEP
from benchmarks.harness.plan import StoredCell
from vllm_treespec.batch.stats import KEEP_FEATURES


def plain_steps_of(finished: Sequence[StoredCell]) -> list[dict[str, Any]]:
    """Times of a step without trees beside plain vLLM's: a row for each round.

    Times are in milliseconds, medians over the answers; ``ratio`` is the median of
    their ratios, ``own_ms`` what our stages count, ``features_ms`` a part of it.
    """
    rows = []
    for result in [s.result for s in finished if s.side.name == PLAIN_STEP]:
        both = result.details["ours_ms"], result.details["plain_ms"]
        pairs = [(a, b) for a, b in zip(*both, strict=True) if a and b]
        stages, steps = result.stage_seconds, result.steps or 1
        row = {
            "answers": len(pairs),
            "ours_ms": statistics.median(ours for ours, _ in pairs),
            "plain_ms": statistics.median(plain for _, plain in pairs),
            "ratio": statistics.median(ours / plain for ours, plain in pairs),
            "own_ms": 1000 * (stages["draft"] + stages["tree_build"]) / steps,
            "features_ms": 1000 * stages[KEEP_FEATURES] / steps,
        }
        rows.append(row)
    return rows
