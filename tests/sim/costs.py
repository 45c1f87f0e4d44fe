"""What the steps of a simulated machine take."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

from vllm_treespec.schedule.forward_times import ROWS, ForwardTimes
from vllm_treespec.schedule.plan import Work

# Rows of a forward from which on its fast kernels run.
FAST_KERNEL_ROWS = 4
# Sizes of CUDA graphs, as vLLM captures them.
GRAPH_SIZES = (1, 2, 4, *range(8, 257, 8), *range(272, 513, 16))


@dataclass(frozen=True)
class Costs:
    """Seconds of the parts of a step.

    Attributes:
        one_row: a forward of the target.
        row: each of its rows after ``free_rows``.
        padded: whether its rows are filled up to the next of ``GRAPH_SIZES``.
        small_kernel: factor of a forward of fewer than four rows.
        request: each request but the first.
        sampled: each sampled request.
        fixed: any drafts.
        branches: any tree that is no chain.
        lookup: looking up an index for all requests.
        level: a level that draft models read, of one request; ``level_request``: of
            each other one.
        caught_up: a token that draft models catch up on.

    """

    one_row: float = 1.0
    row: float = 0.0
    free_rows: int = 1
    padded: bool = False
    small_kernel: float = 1.0
    request: float = 0.0
    sampled: float = 0.0
    fixed: float = 0.0
    branches: float = 0.0
    lookup: float = 0.0
    level: float = 0.0
    level_request: float = 0.0
    caught_up: float = 0.0

    def forward(self, rows: int) -> float:
        """A forward of the target."""
        if self.padded and rows <= GRAPH_SIZES[-1]:
            rows = GRAPH_SIZES[bisect_left(GRAPH_SIZES, rows)]
        seconds = self.one_row + self.row * max(0, rows - self.free_rows)
        return seconds * (self.small_kernel if rows < FAST_KERNEL_ROWS else 1.0)

    def plain(self, requests: int, num_sampled: int = 0) -> float:
        """A step without drafts."""
        others = self.request * (requests - 1) + self.sampled * num_sampled
        return self.forward(requests) + others

    def drafting(self, work: Work, num_trees: int) -> float:
        """What drafting takes, before the target runs.

        Args:
            work: of the step.
            num_trees: requests for which models draft.

        """
        a_level = self.level + self.level_request * max(num_trees - 1, 0)
        return (
            self.lookup * bool(work.lookup)
            + a_level * work.levels
            + self.caught_up * work.caught_up
        )

    def step(self, work: Work, num_trees: int, num_sampled: int) -> float:
        """A whole step."""
        others = self.request * (work.requests - 1) + self.sampled * num_sampled
        others += self.fixed * bool(work.rows) + self.branches * bool(work.branches)
        forward = self.forward(work.requests + int(work.rows))
        return forward + others + self.drafting(work, num_trees)

    def more_row(self, requests: int) -> float:
        """One more row of the target, beside a row of each request."""
        more = max(2 * requests, 8)
        return (self.forward(requests + more) - self.forward(requests)) / more

    def forwards(self) -> ForwardTimes:
        """Forwards as they are timed when an engine starts."""
        target = {rows: self.forward(rows) for rows in ROWS}
        levels = {
            rows: self.level + max(self.level_request, self.caught_up) * (rows - 1)
            for rows in ROWS
        }
        return ForwardTimes(target, levels if self.level else {})
