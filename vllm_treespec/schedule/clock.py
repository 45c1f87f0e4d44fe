"""Times steps between their plans, and hands a schedule their results."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from vllm_treespec.aids import aiding
from vllm_treespec.batch.matching import Proposal, rows_of
from vllm_treespec.batch.stats import StepStats
from vllm_treespec.batch.views import EmittedBatch, ScheduledBatch
from vllm_treespec.schedule.base import Schedule
from vllm_treespec.schedule.plan import (
    PLAIN_PLAN,
    RunningRequests,
    StepPlan,
    StepResult,
    Work,
)
from vllm_treespec.schedule.step_log import log_step
from vllm_treespec.trees.draft import NO_TOKEN
from vllm_treespec.trees.source import Source

# What a step drafts with that draws no tree, in statistics.
PLAIN = "plain"
# Plans of steps that run; a schedule that has failed observes none.
MAX_PLANNED = 8


@dataclass(frozen=True)
class Planned:
    """A plan, and the step at whose end it was made."""

    plan: StepPlan
    # name of the tree, or "plain"
    mode: str
    # of the requests that ran and go on, how many ran, and whether one was sampled
    slots: frozenset[int]
    num_reqs: int
    sampled: bool
    # whether that step only decoded, so that draft models had no prompt to read after
    # it
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


class StepClock:
    """Stands between a decoder and its schedule.

    At the end of a step, unless it ``rests``, comes ``observe``, then ``plan``, and
    ``drafted`` last. An engine that does not wait for a step plans the one after it
    before it observes it. Where a schedule fails, or what is noted for it, all later
    steps are plain.
    """

    def __init__(
        self,
        schedule: Schedule,
        stats: StepStats,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Begin without a plan; ``clock`` gives seconds."""
        self.schedule = schedule
        self.aid = schedule.aid
        self.stats = stats
        self.clock = clock
        self.last = Planned(PLAIN_PLAN, PLAIN, frozenset(), 0, False, False, 0.0)
        # of the steps that were not observed
        self.planned = deque([self.last], maxlen=MAX_PLANNED)
        # of a clock in seconds, when a step was observed last
        self.observed = 0.0
        # from the last plan to the drafts; 0: not known
        self.drafting_seconds = 0.0
        # since the last plan, which held for them, too
        self.rest = Timed()

    def rests(self, scheduled: ScheduledBatch) -> bool:
        """Whether the last plan, a plain one, holds for the next step, too.

        If not, ``observe`` and ``plan`` come next.

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
        return holds and self._goes_on(self.last, scheduled)

    def plan(
        self, requests: RunningRequests, ran: np.ndarray, only_decoded: bool
    ) -> StepPlan:
        """Plan a step.

        Args:
            requests: that may draft in it.
            ran: int64 [num_reqs], slots of all that ran in the step before.
            only_decoded: whether that step only decoded.

        """
        nothing = PLAIN_PLAN, PLAIN
        plan, mode = self.aid.run(nothing, self._plan, requests)
        self.rest = Timed()
        self.last = Planned(
            plan,
            mode,
            frozenset(ran.tolist()),
            requests.num_reqs,
            any(requests.sampled),
            only_decoded,
            self.clock(),
        )
        self.planned.append(self.last)
        self.drafting_seconds = 0.0
        self.stats.count_step(mode)
        return plan

    def _plan(self, requests: RunningRequests) -> tuple[StepPlan, str]:
        """The schedule's plan, and the name of its tree."""
        plan = self.schedule.plan(requests)
        if plan.tree is None:
            return plan, PLAIN
        return plan, self.schedule.trees[plan.tree].name

    @aiding
    def observe(
        self,
        scheduled: ScheduledBatch,
        batch: EmittedBatch,
        proposal: Proposal | None,
        accepted: np.ndarray,
        by_source: np.ndarray,
    ) -> None:
        """Note how long a step took, and what was accepted of its trees.

        It is the first one that was planned and not observed.

        Args:
            scheduled: the step before its forward.
            batch: the same after its tokens were emitted.
            proposal: what was drawn for it, if anything.
            accepted: drafts accepted of each request's tree, -1 without one; int64
                [num_reqs].
            by_source: those of them that an index, and that a model drafted, int64
                [num_reqs, 2].

        """
        planned = self.planned.popleft()
        result = self._result(planned, batch, proposal, accepted, by_source)
        num_drawn = 0 if proposal is None else len(proposal.slots)
        as_planned = (num_drawn > 0) == (result.tree is not None)
        seconds = None
        if as_planned and len(result.slots) == num_drawn:
            caught_up = int(result.work.caught_up)
            timed = self._timed(planned, scheduled, batch, caught_up)
            if timed.num_steps:
                seconds = timed.end - max(planned.time, self.observed)
                self.stats.count_timed(planned.mode, seconds, timed.num_tokens)
                seconds /= timed.num_steps
        self.observed = self.clock()
        result = replace(result, seconds=seconds)
        log_step(result)
        self.schedule.observe(result)

    def _result(
        self,
        planned: Planned,
        batch: EmittedBatch,
        proposal: Proposal | None,
        accepted: np.ndarray,
        by_source: np.ndarray,
    ) -> StepResult:
        """What the trees of a step brought, see ``observe``; its time is left out."""
        plan, num_steps = planned.plan, 1 + self.rest.num_steps
        work = Work(planned.num_reqs, planned.sampled, lookup=float(plan.lookup))
        if proposal is None:
            return StepResult(
                plan.tree,
                work,
                drafting_seconds=self.drafting_seconds,
                num_steps=num_steps,
                is_usual=plan.is_usual,
            )
        rows = rows_of(proposal.slots, batch.slots)
        # A tree that did not come back tells nothing.
        came = (accepted >= 0) | (proposal.num_drafts[rows] == 0)
        places = np.flatnonzero(came & (rows >= 0) & batch.emitted)
        rows = rows[places]
        num_drafts, limits = proposal.num_drafts[rows], proposal.node_limits[rows] - 1
        num_read = limits if proposal.is_filled else num_drafts
        num_accepted = accepted[places].clip(min=0)
        claimed: dict[Source, list[float]] = {}
        kept: dict[Source, list[int]] = {}
        tree = self.schedule.trees[proposal.tree_index]
        if tree.prunes_by_cost:
            emitted = batch.token_ids[places, batch.end[places]]
            claimed, kept = compared(
                proposal, rows, tree.sources, num_accepted, by_source[places], emitted
            )
        return StepResult(
            plan.tree,
            work._replace(
                rows=int(num_read.sum()),
                drafted=float(num_read.any()),
                branches=float(proposal.is_branching(rows, 1 + num_drafts)),
                levels=proposal.num_levels,
                caught_up=proposal.num_caught_up,
            ),
            slots=proposal.slots[rows].tolist(),
            num_drafts=num_drafts.tolist(),
            num_accepted=num_accepted.tolist(),
            limits=limits.tolist(),
            claimed=claimed,
            accepted=kept,
            drafting_seconds=self.drafting_seconds,
            num_steps=num_steps,
            is_usual=plan.is_usual,
        )

    def drafted(self) -> None:
        """Note how long it took to draft, since the plan."""
        self.drafting_seconds = self.clock() - self.last.time

    def _timed(
        self,
        planned: Planned,
        scheduled: ScheduledBatch,
        batch: EmittedBatch,
        num_caught_up: int,
    ) -> Timed:
        """The steps since a plan, less the last one if it did other work, too.

        That draft models read a prompt before they draft is such work, unless it is
        known how many tokens they caught up on.
        """
        reading_is_known = planned.only_decoded or num_caught_up > 0
        if not (reading_is_known and self._goes_on(planned, scheduled)):
            return self.rest
        num_tokens = self.rest.num_tokens + int(batch.num_emitted.sum())
        return Timed(1 + self.rest.num_steps, num_tokens, self.clock())

    def _goes_on(self, planned: Planned, scheduled: ScheduledBatch) -> bool:
        """Whether a step only decoded, for the requests of a plan."""
        slots = set(scheduled.slots.tolist())
        return scheduled.only_decodes and planned.slots == slots

    def forget(self, slots: np.ndarray) -> None:
        """Forget the requests that ended, by their slots, int64 [n].

        A step without them is not timed: the engine may have idled before it.
        """
        if len(slots):
            self.aid.run(None, self.schedule.forget, slots.tolist())
            self.last = replace(self.last, slots=frozenset())
            ended = [replace(plan, slots=frozenset()) for plan in self.planned]
            self.planned = deque(ended, maxlen=MAX_PLANNED)


def compared(
    proposal: Proposal,
    rows: np.ndarray,
    sources: Source,
    num_accepted: np.ndarray,
    by_source: np.ndarray,
    emitted: np.ndarray,
) -> tuple[dict[Source, list[float]], dict[Source, list[int]]]:
    """Claimed and accepted tokens of trees, by source.

    Args:
        proposal: the trees.
        rows: int64 [n], of the trees.
        sources: of their method.
        num_accepted: int64 [n], drafts of each that were accepted.
        by_source: int64 [n, 2], of these those of an index, and of a model, where the
            method has both.
        emitted: int64 [n], the token that came after a root without drafts.

    Returns:
        both [n], for each source.

    """
    both = Source.INDEX, Source.MODEL
    if sources != Source.INDEX | Source.MODEL:
        claimed = {sources: claims_of(proposal, rows)}
        accepted = {sources: num_accepted}
    else:
        claimed = {source: claims_of(proposal, rows, source) for source in both}
        accepted = dict(zip(both, by_source.T, strict=True))
    if proposal.shadow_token_ids is not None:
        assert proposal.shadow_claims is not None
        token_ids = proposal.shadow_token_ids[rows]
        claimed[Source.INDEX] = claimed[Source.INDEX] + proposal.shadow_claims[rows]
        accepted[Source.INDEX] = with_shadow_drafts(
            token_ids, emitted, accepted[Source.INDEX]
        )
    return (
        {source: claims.tolist() for source, claims in claimed.items()},
        {source: tokens.tolist() for source, tokens in accepted.items()},
    )


def claims_of(
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


def with_shadow_drafts(
    token_ids: np.ndarray, emitted: np.ndarray, num_accepted: np.ndarray
) -> np.ndarray:
    """Accepted drafts, shadow drafts included, int64 [n].

    Args:
        token_ids: int64 [n], see ``HostDraft``.
        emitted: int64 [n], the token that came after a root without drafts.
        num_accepted: int64 [n], of the drafts of the others.

    """
    return np.where(token_ids == NO_TOKEN, num_accepted, token_ids == emitted)
