"""Where a step's time goes, and what the target accepted."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

# In the order of a step. "draft_forward", also counted, is the part of "draft" that the
# draft models' forwards take.
STAGES = ("tree_build", "forward", "score", "commit", "draft")


class StepStats:
    """Running totals of one worker since it started or was last reset."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Start counting anew."""
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.steps = 0
        self.trees = 0
        self.nodes = 0
        self.accepted: Counter[int] = Counter()

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Add the time spent inside to a stage."""
        start = time.perf_counter()
        yield
        self.seconds[name] += time.perf_counter() - start

    def observe(self, num_nodes: list[int], num_accepted: list[int]) -> None:
        """Count the scored trees of a step."""
        self.trees += len(num_nodes)
        self.nodes += sum(num_nodes)
        self.accepted.update(num_accepted)

    def as_dict(self) -> dict[str, Any]:
        """Totals: seconds per stage, steps, trees, nodes, accepted-length counts."""
        return {
            "seconds": dict(self.seconds),
            "steps": self.steps,
            "trees": self.trees,
            "nodes": self.nodes,
            "accepted": dict(self.accepted),
        }
