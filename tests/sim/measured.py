"""The measured schedule behind the interface of plans and results."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from vllm_treespec.schedule.base import RunningRequests, ScheduledTree, StepOutcome
from vllm_treespec.schedule.forward_times import ForwardTimes
from vllm_treespec.schedule.measured import MeasuredSchedule
from vllm_treespec.schedule.plan import PLAIN_PLAN, StepPlan, StepResult
from vllm_treespec.schedule.prices import Prices
from vllm_treespec.trees.source import Source


class MeasuredPlans:
    """Plans by ``MeasuredSchedule``."""

    def __init__(
        self,
        trees: Sequence[ScheduledTree],
        max_trees: int,
        share: Callable[[list[float]], list[float]] = lambda seconds: seconds,
        can_sync: bool = True,
    ) -> None:
        """Begin with nothing measured."""
        self.trees = trees
        self.schedule = MeasuredSchedule(trees, max_trees, share, can_sync)
        self.has_index = any(tree.is_free for tree in trees)

    @property
    def rest_steps(self) -> int:
        """Plain steps that follow the planned one without a plan of their own."""
        return self.schedule.rest_steps

    def begin_with(self, forwards: ForwardTimes) -> None:
        """Begin with forwards that the start has timed."""
        self.schedule.times.begin_with(forwards)

    def plan(self, requests: RunningRequests) -> StepPlan:
        """Plan a step: its choice, and its prices if the tree's drafts have some."""
        tree, slots = self.schedule.choose(requests)
        if tree is None or not slots:
            return PLAIN_PLAN
        is_free = self.trees[tree].is_free
        prices = self.schedule.prices(slots)
        if prices is None:
            return StepPlan(tree, slots, lookup=is_free, model=not is_free)
        return StepPlan(
            tree,
            slots,
            lookup=self.has_index,
            model=not is_free,
            prunes=True,
            row_cost=prices.draft,
            fixed_cost=prices.first,
            branch_cost=prices.branches,
            level_cost=prices.level,
            kept=self._kept(prices, is_free),
            first_level=prices.added,
            max_levels=prices.num_levels,
        )

    def _kept(self, prices: Prices, is_free: bool) -> dict[Source, Sequence[float]]:
        """Accepted over claimed tokens by source."""
        if not self.has_index:
            return {Source.MODEL: prices.kept}
        if is_free:
            return {Source.INDEX: prices.kept}
        return {Source.INDEX: prices.kept, Source.MODEL: prices.model_kept}

    def observe(self, result: StepResult) -> None:
        """Learn from a step."""
        claimed, accepted, work = result.claimed, result.accepted, result.work
        first = Source.INDEX if Source.INDEX in claimed else Source.MODEL
        nothing = [0.0] * len(result.slots)
        beside = first is Source.INDEX and Source.MODEL in claimed
        by_model = beside and work.levels > 0
        self.schedule.observe(
            StepOutcome(
                result.tree,
                work.requests,
                result.slots,
                result.num_drafts,
                result.num_accepted,
                result.limits,
                promised=claimed.get(first, nothing),
                seconds=result.seconds,
                num_levels=int(work.levels),
                num_kept=accepted.get(first, ()),
                num_caught_up=int(work.caught_up),
                num_found=self._found(result),
                drafting_seconds=result.drafting_seconds,
                model_promised=claimed[Source.MODEL] if by_model else (),
                model_kept=accepted[Source.MODEL] if by_model else (),
                num_steps=result.num_steps,
                has_branches=bool(work.branches),
            )
        )

    def _found(self, result: StepResult) -> Sequence[int]:
        """Accepted drafts of the index, without guesses that came true."""
        of_index = result.accepted.get(Source.INDEX)
        if of_index is None:
            return [0] * len(result.slots)
        return [min(a, b) for a, b in zip(of_index, result.num_accepted, strict=True)]

    def forget(self, slots: Sequence[int]) -> None:
        """Forget requests that ended."""
        self.schedule.forget(slots)
