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
from vllm_treespec.trees.draft import NO_TOKEN
from vllm_treespec.trees.source import Source

# What a step drafts with that draws no tree, in statistics.
PLAIN = "plain"


def with_shadow_drafts(
    token_ids: np.ndarray, emitted: np.ndarray, num_accepted: np.ndarray
) -> np.ndarray:
    """Accepted drafts, shadow drafts included, int64 [n].

    Args:
        token_ids: int64 [n], see ``ShadowDrafts``.
        emitted: int64 [n], the token that came after a root without drafts.
        num_accepted: int64 [n], of the drafts of the others.

    """
    return np.where(token_ids == NO_TOKEN, num_accepted, token_ids == emitted)


def claimed(
    proposal: Proposal, rows: np.ndarray, source: Source | None = None
) -> np.ndarray:
    """Sum of the claims of each tree's proposed nodes, float64 [n].

    Args:
        proposal: the trees.
        rows: int64 [n], of the trees.
        source: whose nodes count, also those that it shares; None: all nodes count.

    """
    if proposal.claims is None:
        return np.zeros(len(rows))
    drafts = np.arange(proposal.claims.shape[1])
    counted = drafts < proposal.num_drafts[rows, None]
    if source is not None and proposal.sources is not None:
        counted &= (proposal.sources[rows] & source) > 0
    return np.asarray((proposal.claims[rows] * counted).sum(1))


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
        by_source: np.ndarray | None,
        has_branches: bool,
    ) -> None:
        """Note how long a step took, and what was accepted of its trees.

        Args:
            scheduled: the step before its forward.
            batch: the same after its tokens were emitted.
            proposal: what was drawn for it, if anything.
            accepted: drafts accepted of each request's tree, -1 without one; int64
                [num_reqs].
            by_source: those of them that an index, and that a model drafted, int64
                [num_reqs, 2]; None: the method's trees do not have these two sources.
            has_branches: whether any of the trees is no chain.

        """
        self.only_decoded = scheduled.only_decodes
        outcome = self._outcome(batch, proposal, accepted, by_source, has_branches)
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
        by_source: np.ndarray | None,
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
        num_found = num_of_model = np.zeros_like(num_accepted)
        source, num_kept, model_claims = None, num_accepted, np.zeros(len(rows))
        if not self.schedule.trees[proposal.tree_index].weighs_drafts:
            proposal = replace(proposal, claims=None)
        if by_source is not None:
            num_found, num_of_model = by_source[places].T
            source, num_kept = Source.INDEX, num_found
            model_claims = claimed(proposal, rows, Source.MODEL)
        claims = claimed(proposal, rows, source)
        if proposal.shadow_token_ids is not None:
            assert proposal.shadow_claims is not None
            claims += proposal.shadow_claims[rows]
            emitted = batch.token_ids[places, batch.end[places]]
            num_kept = with_shadow_drafts(
                proposal.shadow_token_ids[rows], emitted, num_kept
            )
        return replace(
            outcome,
            slots=proposal.slots[rows].tolist(),
            num_drafts=proposal.num_drafts[rows].tolist(),
            num_accepted=num_accepted.tolist(),
            limits=(proposal.node_limits[rows] - 1).tolist(),
            promised=claims.tolist(),
            num_kept=num_kept.tolist(),
            num_found=num_found.tolist(),
            model_promised=model_claims.tolist(),
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
