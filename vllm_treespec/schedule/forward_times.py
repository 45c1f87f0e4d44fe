"""How long forwards take by their rows, as timed when an engine starts.

Only additions, products and quotients: they give the same bits on any processor, so
that all ranks choose alike.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise

# Rows of the forwards that are timed, and how often each is at most.
ROWS = (1, 8, 16, 32, 64)
MOST_RUNS = 5
# All forwards of the target take about so many seconds at most, and all levels of
# draft models.
TARGET_SECONDS, LEVELS_SECONDS = 3.5, 1.5
# Rows that the drafts of a step are thought to add.
MORE_ROWS = 48
# Rows of a forward in which a draft model catches up.
CATCHING_UP = 32


@dataclass(frozen=True)
class ForwardTimes:
    """Seconds of forwards, by the number of their rows; empty: not timed.

    Attributes:
        target: of the target, output layer included.
        draft: of the draft models, for one level of a tree.

    """

    target: Mapping[int, float] = field(default_factory=dict)
    draft: Mapping[int, float] = field(default_factory=dict)

    def forward(self, num_rows: int) -> float | None:
        """Seconds of the target's forward of so many rows; None: not timed."""
        return at(self.target, num_rows) if self.target else None

    def extra(self, requests: int, rows: float) -> float | None:
        """How much longer it takes with so many rows of drafts; None: not timed."""
        if not self.target:
            return None
        return more(self.target, requests, requests + rows)

    def level(self, batch_size: int) -> float | None:
        """Seconds of a level that draft models read, one row a request."""
        return at(self.draft, batch_size) if self.draft else None

    def draft_row(self) -> float | None:
        """Seconds of a token that a draft model catches up on."""
        if not self.draft:
            return None
        return more(self.draft, CATCHING_UP, 2 * CATCHING_UP) / CATCHING_UP


NOT_TIMED = ForwardTimes()


def at(seconds: Mapping[int, float], num_rows: float) -> float:
    """Seconds of a forward of any number of rows: a line between the timed ones.

    ``seconds`` ascends in its rows. Behind the last one the last line goes on.
    """
    (first, _), *_ = timed = list(seconds.items())
    found = seconds[first]
    for (rows, here), (next_rows, there) in pairwise(timed):
        if num_rows > rows:
            each = max(there - here, 0.0) / (next_rows - rows)
            found = here + each * (num_rows - rows)
    return found


def more(seconds: Mapping[int, float], num_rows: float, num_more: float) -> float:
    """How much longer a forward of more rows takes."""
    return max(at(seconds, num_more) - at(seconds, num_rows), 0.0)


def time_rows(
    run: Callable[[int], None],
    share: Callable[[list[float]], list[float]],
    most_rows: int,
    most_seconds: float,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[int, float]:
    """Time forwards in turn; of several runs the shortest counts.

    Other work can only make a forward longer, and more rows do not make it shorter. So
    no time is longer than that of a forward of more rows.

    Args:
        run: one forward of so many rows, until it is done.
        share: hands out rank 0's times; all ranks call it as often.
        most_rows: that a forward may have.
        most_seconds: that all of them may take.
        clock: gives seconds.

    Returns:
        seconds by number of rows; empty where a forward takes too long to time several.

    """

    def timed(num_rows: int) -> float:
        start = clock()
        run(num_rows)
        return clock() - start

    rows = [num_rows for num_rows in ROWS if num_rows <= most_rows]
    (of_one_row,) = share([min(timed(rows[0]), timed(rows[0]))])
    num_runs = min(int(most_seconds / (len(rows) * of_one_row)), MOST_RUNS)
    if num_runs < 2:
        return {}
    runs = [[timed(num_rows) for num_rows in rows] for _ in range(num_runs)]
    shortest = share([min(of_rows) for of_rows in zip(*runs, strict=True)])
    return {num_rows: min(shortest[i:]) for i, num_rows in enumerate(rows)}
