"""A simulated engine: runs a tape of steps under a schedule."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from tests.sim.costs import Costs
from tests.sim.drafting import Drafted, Tree, draft
from tests.sim.tape import Request, Step
from vllm_treespec.schedule.forward_times import NOT_TIMED, ForwardTimes
from vllm_treespec.schedule.plan import (
    PLAIN_PLAN,
    RunningRequests,
    StepPlan,
    StepResult,
    Work,
)

# Requests that may carry a tree in one step.
MAX_TREES = 64
# Scatter of measured times, and the share of disturbed ones, which take longer.
SCATTER, OUTLIERS, OUTLIER = 0.04, 0.01, 3.0
# How much longer first forwards take.
COLD = 1.3


class Schedule(Protocol):
    """What a world asks of a schedule."""

    @property
    def rest_steps(self) -> int:
        """Plain steps that follow the planned one without a plan of their own."""

    def plan(self, requests: RunningRequests) -> StepPlan:
        """Plan a step."""

    def observe(self, result: StepResult) -> None:
        """Learn from a step."""

    def forget(self, slots: Sequence[int]) -> None:
        """Forget requests that ended."""


@dataclass(frozen=True)
class World:
    """All that is given before a schedule plans.

    Attributes:
        costs: of the machine.
        trees: of the schedule.
        steps: a tape.
        can_sync: whether the host waits for what a model drafted.
        is_timed: whether forwards are timed before the first step.
        reads_late: whether models must catch up on tokens that they did not read.
        cold_steps: first steps that take longer.
        cold_model: first steps in which a model drafts that take longer.

    """

    costs: Costs
    trees: Sequence[Tree]
    steps: Sequence[Step]
    can_sync: bool = True
    is_timed: bool = False
    reads_late: bool = False
    cold_steps: int = 0
    cold_model: int = 0

    @property
    def forwards(self) -> ForwardTimes:
        """Those that were timed at the start."""
        return self.costs.forwards() if self.is_timed else NOT_TIMED


class Clock:
    """Measures with noise; the same for all schedules of a seed."""

    def __init__(self, seed: int, factor: float = 1.0) -> None:
        """Take the seed, and how much slower this rank is."""
        self.random = random.Random(seed)
        self.factor = factor

    def noise(self) -> float:
        """Measured over true time of a step."""
        scatter = self.random.gauss(1.0, SCATTER)
        disturbed = self.random.random() < OUTLIERS
        return scatter * (OUTLIER if disturbed else 1.0) * self.factor


@dataclass(frozen=True)
class Record:
    """What a run took and brought, by step."""

    tokens: Sequence[int]
    # true seconds, without the clock's noise
    seconds: Sequence[float]
    plans: Sequence[StepPlan]


@dataclass
class Pending:
    """A planned step and the plain ones that followed it without a plan."""

    result: StepResult
    may_rest: int
    # of those that only decoded
    seconds: list[float]
    num_steps: int = 1

    def told(self) -> StepResult:
        """All of them as one result."""
        times = self.seconds
        mean = sum(times) / len(times) if times else None
        return replace(self.result, seconds=mean, num_steps=self.num_steps)


class Run:
    """The steps of a world under a schedule."""

    def __init__(self, world: World, schedule: Schedule, clock: Clock) -> None:
        """Begin without steps."""
        self.world, self.schedule, self.clock = world, schedule, clock
        self.slots: frozenset[int] = frozenset()
        # tokens that models have not read, by slot
        self.behind: dict[int, int] = {}
        self.pending: Pending | None = None
        self.num_steps = self.num_model_steps = 0

    def record(self) -> Record:
        """Run all steps."""
        steps = [self._step(step) for step in self.world.steps]
        tokens, seconds, plans = zip(*steps, strict=True)
        return Record(tokens, seconds, plans)

    def _step(self, step: Step) -> tuple[int, float, StepPlan]:
        """Run a step; returns its tokens, its true seconds and its plan."""
        slots = frozenset(request.slot for request in step.requests)
        is_new = slots != self.slots
        noise = self.clock.noise()
        if self.pending is not None and self._rests(step, is_new):
            seconds = self._seconds(step, Work(len(slots)), 0)[0]
            self.pending.num_steps += 1
            self.pending.seconds.append(seconds * noise)
            self._count_behind(step, {}, [], Drafted((), ()))
            return len(slots), seconds, PLAIN_PLAN
        self._report(slots)
        plan = self.schedule.plan(self._running(step))
        wanted = set(plan.slots)
        drawn = [i for i, each in enumerate(step.requests) if each.slot in wanted]
        drafted = self._draft(step, plan, drawn)
        read: dict[int, int] = {}
        if drafted.levels:
            read = self._read(step, plan, drawn)
            ready = [i for i in drawn if read[i] == self._behind(step.requests[i])]
            if not ready and plan.lookup:
                drafted = self._draft(step, replace(plan, model=False), drawn)
            elif ready != drawn:
                drawn = ready
                plan = plan.of_slots([step.requests[i].slot for i in drawn])
                drafted = self._draft(step, plan, drawn)
        work = self._work(step, drafted, sum(read.values()))
        seconds, drafting = self._seconds(step, work, len(drawn))
        as_planned = bool(drawn) == (plan.tree is not None)
        is_timed = not step.reads_prompt and (not is_new or work.caught_up > 0)
        may_rest = 0 if is_new or plan.tree is not None else self.schedule.rest_steps
        self.pending = Pending(
            self._result(step, plan, drawn, drafted, work, drafting * noise),
            may_rest,
            [seconds * noise] if is_timed and as_planned else [],
        )
        self._count_behind(step, read, drawn, drafted)
        return len(slots) + sum(drafted.num_accepted), seconds, plan

    def _rests(self, step: Step, is_new: bool) -> bool:
        """Whether a step follows a plain one without a plan of its own."""
        assert self.pending is not None
        is_decode = not (is_new or step.reads_prompt)
        return is_decode and self.pending.num_steps <= self.pending.may_rest

    def _report(self, slots: frozenset[int]) -> None:
        """Tell the schedule of the steps since its last plan, and who ended."""
        if self.pending is not None:
            self.schedule.observe(self.pending.told())
        ended = sorted(self.slots - slots)
        if ended:
            self.schedule.forget(ended)
        self.slots = slots

    def _running(self, step: Step) -> RunningRequests:
        """The requests, as a schedule sees them."""
        drafting = [request for request in step.requests if request.limit]
        return RunningRequests(
            num_reqs=len(step.requests),
            slots=[request.slot for request in drafting],
            sampled=[request.sampled for request in drafting],
            limits=[request.limit for request in drafting],
            num_behind=[self._behind(request) for request in drafting],
        )

    def _behind(self, request: Request) -> int:
        """Tokens that models have not read of a request."""
        if not self.world.reads_late:
            return 0
        return self.behind.get(request.slot, request.prompt)

    def _read(self, step: Step, plan: StepPlan, drawn: Sequence[int]) -> dict[int, int]:
        """Tokens that models catch up on, by place; who is not behind comes first."""
        left, read = plan.max_caught_up, dict[int, int]()
        for i in sorted(drawn, key=lambda i: self._behind(step.requests[i]) > 0):
            behind = self._behind(step.requests[i])
            read[i] = behind if left is None else min(behind, left)
            left = None if left is None else left - read[i]
        return read

    def _count_behind(
        self,
        step: Step,
        read: Mapping[int, int],
        drawn: Sequence[int],
        drafted: Drafted,
    ) -> None:
        """Note what models have not read after a step."""
        if not self.world.reads_late:
            return
        accepted = dict(zip(drawn, drafted.num_accepted, strict=True))
        ready = set(drawn) if drafted.levels else set()
        for i, request in enumerate(step.requests):
            left = self._behind(request) - read.get(i, 0)
            emitted = 1 + accepted.get(i, 0)
            self.behind[request.slot] = 0 if i in ready else left + emitted

    def _draft(self, step: Step, plan: StepPlan, drawn: Sequence[int]) -> Drafted:
        """Draft for the requests of a plan, by their places in the step."""
        if plan.tree is None or not drawn:
            return Drafted((), ())
        return draft(
            plan,
            self.world.trees[plan.tree],
            [step.requests[i] for i in drawn],
            [step.draws[i] for i in drawn],
            self.world.can_sync,
        )

    def _work(self, step: Step, drafted: Drafted, caught_up: int) -> Work:
        """What a step does."""
        rows = sum(drafted.num_drafts)
        return Work(
            requests=len(step.requests),
            sampled=any(request.sampled for request in step.requests),
            rows=rows,
            drafted=rows > 0,
            branches=drafted.branches,
            lookup=drafted.lookup,
            levels=drafted.levels,
            caught_up=caught_up,
        )

    def _seconds(self, step: Step, work: Work, num_trees: int) -> tuple[float, float]:
        """True seconds of a step, and those of its drafting that the host sees."""
        num_sampled = sum(request.sampled for request in step.requests)
        costs, pace = self.world.costs, step.pace
        if self.num_steps < self.world.cold_steps:
            pace *= COLD
        if work.levels:
            pace *= COLD if self.num_model_steps < self.world.cold_model else 1.0
            self.num_model_steps += 1
        self.num_steps += 1
        seen = work if self.world.can_sync else work._replace(levels=0, caught_up=0)
        drafting = costs.drafting(seen, num_trees)
        return pace * costs.step(work, num_trees, num_sampled), pace * drafting

    def _result(
        self,
        step: Step,
        plan: StepPlan,
        drawn: Sequence[int],
        drafted: Drafted,
        work: Work,
        drafting: float,
    ) -> StepResult:
        """What a step brought; its time is left out."""
        return StepResult(
            tree=plan.tree,
            work=work,
            slots=[step.requests[i].slot for i in drawn],
            num_drafts=drafted.num_drafts,
            num_accepted=drafted.num_accepted,
            limits=[step.requests[i].limit for i in drawn],
            claimed=drafted.claimed,
            accepted=drafted.accepted,
            drafting_seconds=drafting,
            is_usual=plan.is_usual,
        )


def run(
    world: World, schedule: Schedule, seed: int = 0, clock_factor: float = 1.0
) -> Record:
    """The steps of a world under a schedule, measured by a clock of this seed."""
    return Run(world, schedule, Clock(seed, clock_factor)).record()
