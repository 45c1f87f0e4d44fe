"""Asks the schedule for the tree of a step, and tells it what the last one brought."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from vllm_treespec.aids import aiding
from vllm_treespec.batch.matching import Proposal
from vllm_treespec.batch.stats import StepStats
from vllm_treespec.batch.views import GREEDY_BELOW, EmittedBatch, ScheduledBatch
from vllm_treespec.schedule.base import RunningRequests, Schedule, StepOutcome
from vllm_treespec.trees.tree import NO_GUESS

# What a step drafts with that draws no tree, in statistics.
PLAIN = "plain"


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


def promised_by(promised: np.ndarray | None, rows: np.ndarray) -> list[float]:
    """What these trees promised, int64 [n] rows of all; 0 where nothing was."""
    return [0.0] * len(rows) if promised is None else promised[rows].tolist()


@dataclass(frozen=True)
class Choice:
    """What the schedule chose at the end of a step."""

    # None: plain
    index: int | None
    # name of the tree, or "plain"
    mode: str
    # of the requests that ran
    slots: frozenset[int]
    # whether the step at whose end it was made only decoded, so that draft models had
    # no prompt to read after it
    only_decoded: bool
    # of a clock in seconds
    time: float


@dataclass(frozen=True)
class Timed:
    """Plain steps, or one step, that only decoded for the same requests."""

    num_steps: int = 0
    # that they emitted together
    num_tokens: int = 0
    # of a clock in seconds, when the last one was over
    end: float = 0.0


class Chooser:
    """Chooses the tree of each step.

    At the end of a step, unless it ``rests``, comes ``observe``, then ``choose``, and
    ``drafted`` last. Where a schedule fails, or what is noted for it, all later steps
    are plain.
    """

    def __init__(
        self,
        schedule: Schedule,
        stats: StepStats,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Begin without a choice; ``clock`` gives seconds."""
        self.schedule = schedule
        self.aid = schedule.aid
        self.stats = stats
        self.clock = clock
        # of trees, by their index: to make a name takes longer than to choose
        self.modes = {i: tree.name for i, tree in enumerate(schedule.trees)}
        self.last = Choice(None, PLAIN, frozenset(), False, 0.0)
        self.only_decoded = False
        # from the last choice to the drafts
        self.drafting_seconds = 0.0
        # since the last choice, which held for them, too
        self.rest = Timed()

    def rests(self, scheduled: ScheduledBatch) -> bool:
        """Whether the last choice, a plain one, holds for the next step, too.

        If not, ``observe`` and ``choose`` come next.

        Args:
            scheduled: a step without trees, in which every request emitted a token.

        """
        if not self.aid.run(False, self._holds, scheduled):
            return False
        num_tokens = self.rest.num_tokens + len(scheduled.slots)
        self.rest = Timed(1 + self.rest.num_steps, num_tokens, self.clock())
        self.stats.count_step(PLAIN)
        return True

    def _holds(self, scheduled: ScheduledBatch) -> bool:
        """The same, before the step is noted."""
        num_steps = 1 + self.rest.num_steps
        holds = self.last.only_decoded and num_steps <= self.schedule.rest_steps
        return holds and self._goes_on(scheduled)

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
        nobody = np.zeros(len(reqs), dtype=bool)
        index, mode, drawn_for = self.aid.run(
            (None, PLAIN, nobody), self._ask, batch, reqs, limits, num_behind
        )
        self.rest = Timed()
        ran = frozenset(batch.slots.tolist())
        self.last = Choice(index, mode, ran, self.only_decoded, self.clock())
        self.stats.count_step(mode)
        return index, drawn_for

    def _ask(
        self,
        batch: EmittedBatch,
        reqs: np.ndarray,
        limits: np.ndarray,
        num_behind: np.ndarray,
    ) -> tuple[int | None, str, np.ndarray]:
        """Ask the schedule, see ``choose``; the tree's name lies between."""
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
        drawn = set(drawn_for)
        return index, mode, np.array([slot in drawn for slot in slots], dtype=bool)

    @aiding
    def observe(
        self,
        scheduled: ScheduledBatch,
        batch: EmittedBatch,
        proposal: Proposal | None,
        accepted: np.ndarray,
        by_part: np.ndarray,
        has_branches: bool,
    ) -> None:
        """Note how long a step took, and what was accepted of its trees.

        Args:
            scheduled: the step before its forward.
            batch: the same after its tokens were emitted.
            proposal: what was drawn for it, if anything.
            accepted: drafts accepted of each request's tree, -1 without one; int64
                [num_reqs].
            by_part: those of them that each part drafted, where an index and a model
                draft, int64 [num_reqs, 2].
            has_branches: whether any of the trees is no chain.

        """
        self.only_decoded = scheduled.only_decodes
        outcome = self._outcome(batch, proposal, accepted, by_part, has_branches)
        num_drawn = 0 if proposal is None else len(proposal.slots)
        as_chosen = (num_drawn > 0) == (outcome.index is not None)
        seconds = None
        if as_chosen and len(outcome.slots) == num_drawn:
            timed = self._timed(scheduled, batch, outcome.num_caught_up)
            if timed.num_steps:
                seconds = timed.end - self.last.time
                self.stats.count_timed(self.last.mode, seconds, timed.num_tokens)
                seconds /= timed.num_steps
        self.schedule.observe(replace(outcome, seconds=seconds))

    def _outcome(
        self,
        batch: EmittedBatch,
        proposal: Proposal | None,
        accepted: np.ndarray,
        by_part: np.ndarray,
        has_branches: bool,
    ) -> StepOutcome:
        """What the trees of a step brought, see ``observe``; its time is left out."""
        outcome = StepOutcome(
            self.last.index,
            len(self.last.slots),
            drafting_seconds=self.drafting_seconds,
            num_steps=1 + self.rest.num_steps,
        )
        if proposal is None:
            return outcome
        rows = proposal.rows_of(batch.slots)
        # A tree that did not come back tells nothing.
        told = (accepted >= 0) | (proposal.num_drafts[rows] == 0)
        places = np.flatnonzero(told & (rows >= 0) & batch.emitted)
        rows = rows[places]
        num_accepted = accepted[places].clip(min=0)
        num_found, num_of_model = by_part[places].T
        has_two_parts = proposal.second_promised is not None
        num_kept = num_found if has_two_parts else num_accepted
        if proposal.guesses is not None:
            emitted = batch.token_ids[places, batch.end[places]]
            num_kept = with_guesses(proposal.guesses[rows], emitted, num_kept)
        return replace(
            outcome,
            slots=proposal.slots[rows].tolist(),
            num_drafts=proposal.num_drafts[rows].tolist(),
            num_accepted=num_accepted.tolist(),
            limits=(proposal.node_limits[rows] - 1).tolist(),
            promised=promised_by(proposal.promised, rows),
            num_kept=num_kept.tolist(),
            num_found=num_found.tolist(),
            model_promised=promised_by(proposal.second_promised, rows),
            model_kept=num_of_model.tolist(),
            num_levels=proposal.num_levels,
            has_branches=has_branches,
            num_caught_up=proposal.num_caught_up,
        )

    def drafted(self) -> None:
        """Note how long it took to draft, since the choice of the tree."""
        self.drafting_seconds = self.clock() - self.last.time

    def _timed(
        self, scheduled: ScheduledBatch, batch: EmittedBatch, num_caught_up: int
    ) -> Timed:
        """The steps since the last choice, less the last one if it did other work, too.

        That draft models read a prompt before they draft is such work, unless it is
        known how many tokens they caught up on.
        """
        reading_is_known = self.last.only_decoded or num_caught_up > 0
        if not (reading_is_known and self._goes_on(scheduled)):
            return self.rest
        num_tokens = self.rest.num_tokens + int(batch.num_emitted.sum())
        return Timed(1 + self.rest.num_steps, num_tokens, self.clock())

    def _goes_on(self, scheduled: ScheduledBatch) -> bool:
        """Whether a step only decoded, for the requests of the last choice."""
        slots = set(scheduled.slots.tolist())
        return scheduled.only_decodes and self.last.slots == slots

    def forget(self, slots: np.ndarray) -> None:
        """Forget the requests that ended, by their slots, int64 [n].

        A step without them is not timed: the engine may have idled before it.
        """
        if len(slots):
            self.aid.run(None, self.schedule.forget, slots.tolist())
            self.last = replace(self.last, slots=frozenset())
