"""Learns from the times of steps, the same on every rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from vllm_treespec.schedule.asking import Asking
from vllm_treespec.schedule.costs import StepCosts
from vllm_treespec.schedule.forward_times import NOT_TIMED, ForwardTimes
from vllm_treespec.schedule.options import Option
from vllm_treespec.schedule.prices import DraftParts


@dataclass(frozen=True)
class TimedStep:
    """What a step did of which the time is known."""

    batch_size: int
    # whether any of its requests was sampled
    is_sampled: bool
    option: Option
    # of its requests, trees that were made smaller by their part that was left
    share: float
    # how often each part of what drafts cost came
    counts: DraftParts
    # whether the step before was of the same option, batch size and kind, and draft
    # models were not far behind; else it tells only what catching up takes
    settled: bool
    # that were all like it, and took so long each
    num_steps: int = 1


class TimedSteps:
    """The times of steps: what greedy ones cost, and sampled ones.

    Steps with a sampled request count apart: to draw takes time, and a tree must not be
    judged by plain steps that drew more.
    """

    def __init__(
        self,
        options: Sequence[Option],
        share: Callable[[list[float]], list[float]],
        host_may_wait: bool = True,
    ) -> None:
        """Begin with nothing measured.

        Args:
            options: one of them is plain.
            share: hands out rank 0's times.
            host_may_wait: for the device; else what drafting takes does not show on the
                host.

        """
        self.host_may_wait = host_may_wait
        self.has_index = any(option.is_free for option in options)
        self.share = share
        # whether some request is sampled -> times
        self.costs_by_kind = {
            is_sampled: StepCosts(options) for is_sampled in (False, True)
        }
        # what asking an index takes, and brings; an index that pays for greedy requests
        # may not for sampled ones
        self.asking_by_kind = {
            is_sampled: Asking(costs.steps_at)
            for is_sampled, costs in self.costs_by_kind.items()
        }
        self.new_steps: list[TimedStep] = []
        # of each of them, and after it what its drafting took
        self.new_seconds: list[float] = []

    @property
    def forwards(self) -> ForwardTimes:
        """Those that a start has timed; none once they turned out another machine's."""
        of_kinds = [costs.drafts.forwards for costs in self.costs_by_kind.values()]
        return NOT_TIMED if NOT_TIMED in of_kinds else of_kinds[0]

    def begin_with(self, forwards: ForwardTimes) -> None:
        """Begin with forwards that a start has timed; no step was taken yet."""
        for costs in self.costs_by_kind.values():
            costs.begin_with(forwards)

    def add(self, step: TimedStep, seconds: float, drafting: float) -> None:
        """Note a step: what it took, and from its choice to its drafts."""
        self.new_steps.append(step)
        self.new_seconds += [seconds, drafting]

    def take_in(self) -> None:
        """Learn from the noted steps, by rank 0's times on every rank."""
        if not self.new_steps:
            return
        shared = self.share(self.new_seconds)
        for timed, seconds, drafting in zip(
            self.new_steps, shared[::2], shared[1::2], strict=True
        ):
            size, option = timed.batch_size, timed.option
            costs = self.costs_by_kind[timed.is_sampled]
            asking = self.asking_by_kind[timed.is_sampled]
            if option.weighs_drafts:
                asked = self._asking_seconds(timed, seconds, drafting)
                models = max(drafting - asked, 0.0) if self.host_may_wait else 0.0
                costs.add_drafts(size, timed.counts, seconds - asked, models)
            if timed.settled:
                caught_up = timed.counts.caught_up
                usual = costs.without_catching_up(size, caught_up, seconds)
                costs.add(size, option.index, timed.share, usual, timed.num_steps)
            if option.is_free:
                asking.took(size, drafting)
        self.new_steps, self.new_seconds = [], []

    def _asking_seconds(
        self, timed: TimedStep, seconds: float, drafting: float
    ) -> float:
        """What asking an index took in a step; learns from one without drafts.

        It is no part of the price of drafts, nor of a plain step, as which one counts
        that had no drafts.
        """
        size, asking = timed.batch_size, self.asking_by_kind[timed.is_sampled]
        if not self.has_index:
            return 0.0
        if any(timed.counts):
            return asking.seconds(size)
        plain = self.costs_by_kind[timed.is_sampled].plain(size)
        if plain is not None:
            asking.found_nothing(size, seconds - plain.seconds)
        return drafting
