"""Trees, requests, plans and results for tests of schedules."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from tests.sim.drafting import Tree
from vllm_treespec.schedule.base import ScheduledTree
from vllm_treespec.schedule.listed import ListedSchedule
from vllm_treespec.schedule.plan import RunningRequests, StepPlan, StepResult, Work
from vllm_treespec.schedule.scheduler import AdaptiveScheduler
from vllm_treespec.trees.source import Source

# Draft tokens of a request that does not limit its trees.
ALL = 63
BOTH = Source.INDEX | Source.MODEL


# Fixed trees of a head, an index that prunes, and a model beside it.
HEAD = (Tree(16, 3, 8), Tree(5, 2, 4), Tree(4, 1, 4))
INDEX = Tree(16, 12, 16, sources=Source.INDEX, prunes_by_cost=True)
HYBRID = replace(INDEX, sources=BOTH, draft_depth=3)


def running(
    slots: Sequence[int],
    sampled: bool = False,
    limits: Sequence[int] = (),
    num_behind: Sequence[int] = (),
) -> RunningRequests:
    """Requests that all may draft, without limits where none are given."""
    return RunningRequests(
        len(slots),
        slots,
        [sampled] * len(slots),
        limits or [ALL] * len(slots),
        num_behind or [0] * len(slots),
    )


def result_of(
    plan: StepPlan,
    requests: RunningRequests,
    seconds: float | None,
    accepted: Sequence[int] = (),
    num_drafts: Sequence[int] = (),
    claimed: Mapping[Source, Sequence[float]] | None = None,
    kept: Mapping[Source, Sequence[int]] | None = None,
    levels: int = 0,
    caught_up: int = 0,
) -> StepResult:
    """What a planned step brought whose trees all came back.

    Without ``accepted`` nothing was; without ``num_drafts`` each tree has one draft.
    """
    is_plain = plan.tree is None
    drafts = [] if is_plain else list(num_drafts or [1] * len(plan.slots))
    limit_of = dict(zip(requests.slots, requests.limits, strict=True))
    work = Work(
        requests.num_reqs,
        any(requests.sampled),
        rows=sum(drafts),
        drafted=float(any(drafts)),
        lookup=float(plan.lookup),
        levels=levels,
        caught_up=caught_up,
    )
    return StepResult(
        plan.tree,
        work,
        [] if is_plain else plan.slots,
        drafts,
        [] if is_plain else list(accepted or [0] * len(drafts)),
        [] if is_plain else [limit_of[slot] for slot in plan.slots],
        claimed or {},
        kept or {},
        seconds,
        is_usual=plan.is_usual,
    )


def pruning_plan(
    num_reqs: int = 1,
    row_cost: float = 0.0,
    level_cost: float = 0.0,
    kept: Sequence[float] = (),
    kept_of_model: Sequence[float] = (),
    first_level: float = 0.6,
    **costs: Any,
) -> StepPlan:
    """A plan of tree 0 for an index and a model, both of which leave drafts out."""
    ones = [1.0] * num_reqs
    return StepPlan(
        0,
        range(num_reqs),
        lookup=True,
        model=True,
        prunes=True,
        **{"row_cost": row_cost, "level_cost": level_cost, **costs},
        kept={Source.INDEX: kept or ones, Source.MODEL: kept_of_model or ones},
        first_level=[first_level] * num_reqs,
    )


class ConstantCosts(ListedSchedule):
    """Lets each tree leave out what is worth less than constant costs in tokens.

    It keeps what it is told.
    """

    def __init__(
        self,
        trees: Sequence[ScheduledTree],
        row_cost: float = 0.0,
        level_cost: float = 0.0,
    ) -> None:
        """Take the costs."""
        super().__init__(trees)
        self.row_cost, self.level_cost = row_cost, level_cost
        self.results: list[StepResult] = []

    def _plan(self, requests: RunningRequests) -> StepPlan:
        """Add the costs to a plan of the first tree that fits."""
        plan = super()._plan(requests)
        costs = pruning_plan(len(plan.slots), self.row_cost, self.level_cost)
        if plan.tree is None:
            return plan
        return replace(
            costs,
            tree=plan.tree,
            slots=plan.slots,
            lookup=plan.lookup,
            model=plan.model,
        )

    def observe(self, result: StepResult) -> None:
        """Keep it, too."""
        self.results.append(result)
        super().observe(result)


def serve(
    scheduler: AdaptiveScheduler,
    num_steps: int,
    slots: Sequence[int] = (0,),
    sampled: bool = False,
    plain: float = 1.0,
    tree: float = 0.4,
    accepted: int = 1,
) -> list[StepPlan]:
    """Run steps of fixed trees.

    Args:
        scheduler: that plans them.
        num_steps: how many.
        slots: of the requests.
        sampled: whether they are.
        plain: seconds of a plain step.
        tree: seconds that trees add to it.
        accepted: tokens of each tree.

    """
    plans = []
    for _ in range(num_steps):
        requests = running(slots, sampled)
        plan = scheduler.plan(requests)
        seconds = plain + tree * (plan.tree is not None)
        tokens = [accepted] * len(plan.slots)
        scheduler.observe(result_of(plan, requests, seconds, tokens))
        plans.append(plan)
    return plans
