"""Asks the schedule for the tree of a step, and tells it what the last one brought."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from vllm_treespec.core.matching import Proposal
from vllm_treespec.core.schedule import RunningRequests, Schedule, StepOutcome
from vllm_treespec.core.stats import StepStats
from vllm_treespec.core.tree import NO_GUESS
from vllm_treespec.core.views import GREEDY_BELOW, EmittedBatch, ScheduledBatch

# What a step drafts with that draws no tree, in statistics.
PLAIN = "plain"
NO_SLOTS = np.empty(0, dtype=np.int64)


def with_guesses(
    guesses: np.ndarray, emitted: np.ndarray, num_accepted: np.ndarray
) -> np.ndarray:
    """What came true of what trees promised, int64 [n].

    Args:
        guesses: int64 [n], see ``TreeBatch.guesses``.
        emitted: int64 [n], the token that came after a root without drafts.
        num_accepted: int64 [n], of the drafts of the others.

    """
    return np.where(guesses == NO_GUESS, num_accepted, guesses == emitted)


@dataclass(frozen=True)
class Choice:
    """What the schedule chose at the end of a step."""

    # None: plain
    index: int | None
    # name of the tree, or "plain"
    mode: str
    # int64 [num_reqs], the requests that ran
    slots: np.ndarray
    # whether the step at whose end it was made only decoded, so that draft models had
    # no prompt to read after it
    only_decoded: bool
    # of a clock in seconds
    time: float


class Chooser:
    """Chooses the tree of each step.

    ``observe`` comes before ``choose``, at the end of a step, and ``drafted`` last.
    """

    def __init__(
        self,
        schedule: Schedule,
        stats: StepStats,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Begin without a choice; ``clock`` gives seconds."""
        self.schedule = schedule
        self.stats = stats
        self.clock = clock
        # of trees, by their index: to make a name takes longer than to choose
        self.modes = {i: tree.name for i, tree in enumerate(schedule.trees)}
        self.last = Choice(None, PLAIN, NO_SLOTS, False, 0.0)
        self.only_decoded = False
        # from the last choice to the drafts
        self.drafting_seconds = 0.0

    def choose(
        self,
        batch: EmittedBatch,
        reqs: np.ndarray,
        limits: np.ndarray,
        num_behind: np.ndarray,
    ) -> tuple[int | None, np.ndarray]:
        """Choose the tree of a step.

        Args:
            batch: the step.
            reqs: int64 [n], places of the requests that may draft.
            limits: int64 [n], draft tokens that their trees may have.
            num_behind: int64 [n], tokens of earlier steps that draft models would have
                to read.

        Returns:
            the tree's index, None for a plain step; and for which of the requests it is
            drawn, bool [n].

        """
        emitted = batch.emitted[reqs]
        slots = batch.slots[reqs].tolist()
        reqs = reqs[emitted]
        sampled = batch.sampling.host_temperature[reqs] >= GREEDY_BELOW
        index, drawn_for = self.schedule.choose(
            RunningRequests(
                batch.num_reqs,
                batch.slots[reqs].tolist(),
                sampled.tolist(),
                limits[emitted].tolist(),
                num_behind[emitted].tolist(),
            )
        )
        mode = PLAIN if index is None else self.modes[index]
        self.last = Choice(index, mode, batch.slots, self.only_decoded, self.clock())
        self.stats.count_step(mode)
        drawn = set(drawn_for)
        return index, np.array([slot in drawn for slot in slots], dtype=bool)

    def observe(
        self,
        scheduled: ScheduledBatch,
        batch: EmittedBatch,
        proposal: Proposal | None,
        accepted: np.ndarray,
        found: np.ndarray,
    ) -> None:
        """Note how long a step took, and what was accepted of its trees.

        Args:
            scheduled: the step before its forward.
            batch: the same after its tokens were emitted.
            proposal: what was drawn for it, if anything.
            accepted: drafts accepted of each request's tree, -1 without one; int64
                [num_reqs].
            found: those of them that an index drafted, int64 [num_reqs].

        """
        self.only_decoded = bool(
            (scheduled.num_scheduled == 1 + scheduled.num_drafts).all()
        )
        slots = num_drafts = num_accepted = num_kept = num_found = limits = NO_SLOTS
        promised = np.zeros(0)
        num_drawn = num_levels = num_caught_up = 0
        if proposal is not None:
            num_drawn = len(proposal.slots)
            num_levels, num_caught_up = proposal.num_levels, proposal.num_caught_up
            rows = proposal.rows_of(batch.slots)
            # A tree that did not come back tells nothing.
            told = (accepted >= 0) | (proposal.num_drafts[rows] == 0)
            places = np.flatnonzero(told & (rows >= 0) & batch.emitted)
            rows = rows[places]
            slots, num_drafts = proposal.slots[rows], proposal.num_drafts[rows]
            limits = proposal.node_limits[rows] - 1
            promised = np.zeros(len(rows))
            if proposal.promised is not None:
                promised = proposal.promised[rows]
            num_accepted = num_kept = accepted[places].clip(min=0)
            num_found = found[places]
            if proposal.guesses is not None:
                emitted = batch.token_ids[places, batch.end[places]]
                num_kept = with_guesses(proposal.guesses[rows], emitted, num_accepted)
        some_drawn = num_drawn > 0
        as_chosen = some_drawn == (self.last.index is not None)
        all_back = len(slots) == num_drawn
        seconds = None
        if as_chosen and all_back:
            seconds = self._seconds(scheduled, num_caught_up)
        if seconds is not None:
            num_tokens = int(batch.num_emitted.sum())
            self.stats.count_timed(self.last.mode, seconds, num_tokens)
        self.schedule.observe(
            StepOutcome(
                self.last.index,
                len(self.last.slots),
                slots.tolist(),
                num_drafts.tolist(),
                num_accepted.tolist(),
                limits.tolist(),
                promised.tolist(),
                seconds,
                num_levels,
                num_kept.tolist(),
                num_caught_up,
                num_found.tolist(),
                self.drafting_seconds,
            )
        )

    def drafted(self) -> None:
        """Note how long it took to draft, since the choice of the tree."""
        self.drafting_seconds = self.clock() - self.last.time

    def _seconds(self, scheduled: ScheduledBatch, num_caught_up: int) -> float | None:
        """Time since the last choice; None where the step did other work, too.

        That draft models read a prompt before they draft is such work, unless it is
        known how many tokens they caught up on.
        """
        same = set(scheduled.slots.tolist()) == set(self.last.slots.tolist())
        reading_is_known = self.last.only_decoded or num_caught_up > 0
        pure = same and self.only_decoded and reading_is_known
        return self.clock() - self.last.time if pure else None

    def forget(self, slots: np.ndarray) -> None:
        """Forget the requests that ended, by their slots, int64 [n].

        A step without them is not timed: the engine may have idled before it.
        """
        if len(slots):
            self.schedule.forget(slots.tolist())
            self.last = replace(self.last, slots=NO_SLOTS)
