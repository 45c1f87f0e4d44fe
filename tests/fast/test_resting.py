"""Plain steps that follow each other go without the work of drafting."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from tests.fast.features_toy import FeatureSums, SumTree
from tests.fast.toy_workloads import make_method
from tests.tiers import cases
from vllm_treespec.proposers import RsdS
from vllm_treespec.schedule.base import Schedule
from vllm_treespec.schedule.listed import REST_STEPS, ListedSchedule
from vllm_treespec.schedule.plan import (
    PLAIN_PLAN,
    RunningRequests,
    StepPlan,
    StepResult,
    Work,
)
from vllm_treespec.schedule.scheduler import ROUND_STEPS, AdaptiveScheduler
from vllm_treespec.sources.base import Sources
from vllm_treespec.step.method import Method
from vllm_treespec.testing.fake_engine import FakeEngine
from vllm_treespec.testing.fake_scheduler import Habits, Request
from vllm_treespec.testing.toy_models import Language, ToyDraftModel
from vllm_treespec.testing.workloads import HABITS, check_greedy


class InTurn(Schedule):
    """Draws trees in two steps, and none in up to four."""

    num_plans = 0

    def _rest_steps(self) -> int:
        """As many as a listed schedule has."""
        return 0 if self.num_plans % 3 else REST_STEPS

    def _plan(self, requests: RunningRequests) -> StepPlan:
        self.num_plans += 1
        return self.whole_tree(0, requests.slots) if self.num_plans % 3 else PLAIN_PLAN

    def observe(self, result: StepResult) -> None:
        """Learn nothing."""

    def forget(self, slots: Sequence[int]) -> None:
        """Nothing was learned."""


class Noted(AdaptiveScheduler):
    """Has one tree, and notes what it is told."""

    def __init__(self) -> None:
        """Begin with nothing noted."""
        super().__init__(one_tree().schedule.trees, 16)
        self.results: list[StepResult] = []

    def observe(self, result: StepResult) -> None:
        """Note it, too."""
        self.results.append(result)
        super().observe(result)


def one_tree(most_requests: int = 1000) -> Method:
    """A method that draws a tree for so many requests at most."""
    return make_method([RsdS(2, 2)], "recursive_rejection", [most_requests])


def engine_with(schedule: Schedule, habits: Habits) -> FakeEngine:
    """An engine with a draft model and this schedule; its steps take a second."""
    language = Language(0)
    method = replace(one_tree(), schedule=schedule)
    engine = FakeEngine(language, method, Sources([ToyDraftModel(language)]), habits)
    engine.decoder.clock.clock = lambda: float(engine.decoder.step)
    return engine


def long_request(name: str, drafts: bool = True) -> Request:
    """A request that goes on."""
    return Request(name, [1, 2, 3], 60, drafts=drafts)


@pytest.mark.parametrize(
    "name", cases(["whole", "cut", "lost", "chunked prompts"], quick=["cut"])
)
def test_draft_models_read_after_a_rest(name: str) -> None:
    """Red when blocks taken in a rest count as read, as their last owner left them.

    Mostly a model re-reads what lies before them, too. Prompts in chunks it does not.
    """
    habits = replace(HABITS[name], max_running=3, num_blocks=68)
    engine = engine_with(InTurn(one_tree().schedule.trees), habits)
    prompts = [[n % 7, n % 3, n // 7, 2, 3][: 2 + n % 4] for n in range(20)]
    check_greedy(engine, [Request(str(n), p, 60) for n, p in enumerate(prompts)])
    assert engine.num_rested > 100
    assert sum(engine.num_trees) > 100


def test_an_adaptive_scheduler_is_told_of_all_steps_at_once() -> None:
    """Red when steps of a rest are not timed, count for too little or not at all."""
    schedule = Noted()
    engine = engine_with(schedule, Habits())
    engine.add(long_request("a", drafts=False), long_request("b", drafts=False))
    for _ in range(2 + 5 * ROUND_STEPS):
        engine.step()
    latest = [(told.num_steps, told.seconds) for told in schedule.results[-4:]]
    assert latest == [(ROUND_STEPS, 1.0)] * 4
    assert schedule.step >= engine.decoder.step - ROUND_STEPS
    assert schedule.cost.seconds(Work(2)).mean == pytest.approx(1.0)
    assert schedule.cost.steps[2, False] > 4 * ROUND_STEPS
    stats = engine.decoder.stats.as_dict()
    assert stats["modes"]["plain"] == engine.decoder.step
    assert stats["mode_tokens"]["plain"] == 2 * stats["mode_seconds"]["plain"]
    assert stats["mode_seconds"]["plain"] >= engine.decoder.step - ROUND_STEPS - 1


def test_a_request_that_ends_in_a_rest_counts() -> None:
    """Red when steps of several requests teach what a step of one takes."""
    schedule = Noted()
    engine = engine_with(schedule, Habits())
    requests = [long_request(name, drafts=False) for name in "abc"]
    requests[0].max_tokens = 15
    engine.add(*requests)
    for _ in range(30):
        engine.step()
    assert {told.work.requests for told in schedule.results[1:]} == {2, 3}
    assert {size for size, _ in schedule.cost.fits} == {2, 4}


def test_a_rest_ends_when_the_batch_changes() -> None:
    """Red when a new request waits for its trees, or an old one's slot is mixed up."""
    schedule = Noted()
    engine = engine_with(schedule, Habits())
    engine.add(long_request("a", drafts=False))
    while engine.num_rested < REST_STEPS - 1:
        engine.step()
    assert engine.decoder.clock.rest.num_steps
    told = len(schedule.results)
    engine.add(long_request("b"))
    engine.decoder.clock.clock = lambda: 100.0
    engine.step()
    assert len(schedule.results) == told + 1
    assert schedule.results[-1].seconds == 1.0, "a step that read a prompt counts"
    assert len(engine.decoder.clock.last.slots) == 2


def test_a_forced_tree_is_drawn_at_once() -> None:
    """Red when a tree that is forced in a rest waits for its end."""
    schedule = one_tree(most_requests=0).schedule
    engine = engine_with(schedule, Habits())
    engine.add(long_request("a"))
    while not engine.num_rested:
        engine.step()
    schedule.forced_index = 0
    engine.step()
    assert engine.now.requests[0].proposed


def test_a_listed_schedule_counts_steps_of_a_rest() -> None:
    """Red when a tree that was given up is left out for four times as long."""
    schedule = one_tree().schedule
    assert isinstance(schedule, ListedSchedule)
    schedule.measured[0].paused_until = 21
    engine = engine_with(schedule, Habits())
    engine.add(long_request("a"))
    for _ in range(21 + REST_STEPS):
        engine.step()
    assert engine.num_rested > 10
    drawn = [index for _, index in engine.drawn]
    assert drawn[:20] == [None] * 20
    assert drawn[-1] == 0


def test_where_features_are_read_nothing_rests() -> None:
    """Red when a head misses the hidden states of a step."""
    language = Language(0)
    method = make_method([SumTree(2)], "coupled_draw", [0])
    source = FeatureSums(language)
    engine = FakeEngine(language, method, Sources([source]), Habits())
    source.bind(Habits().num_blocks)
    engine.run(long_request("a"))
    assert not engine.num_rested
