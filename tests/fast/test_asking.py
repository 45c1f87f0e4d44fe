"""Whether an index is asked in a step, against an engine of which costs are known."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from tests.fast.test_measured_schedule import Tree, running
from vllm_treespec.schedule.asking import Asking
from vllm_treespec.schedule.base import StepOutcome
from vllm_treespec.schedule.measured import MeasuredSchedule

INDEX = Tree(16, 12, 16, weighs_drafts=True, is_free=True)
NUM_REQS = 8
# What a plain step, which takes 1, grows by: asking, the first draft, each draft.
ASKING, FIRST, EACH = 0.03, 0.08, 0.3 / NUM_REQS


class Serving:
    """Requests that come and go, and an index that finds long continuations or none."""

    def __init__(
        self, seed: int, share: Callable[[list[float]], list[float]] = list
    ) -> None:
        """Begin without steps."""
        self.random = random.Random(seed)
        self.schedule = MeasuredSchedule([INDEX], 64, share)
        # how often a request's text goes on as it did before
        self.repeats = 0.0
        # of asking
        self.slowness = 1.0
        self.sampled = False
        self.asked: list[bool] = []
        self.tokens = self.seconds = 0.0
        self.slots = list(range(NUM_REQS))

    def step(self) -> None:
        """Run a step; drafts are worth their price where the text repeats."""
        index, drawn = self.schedule.choose(running(self.slots, self.sampled))
        prices = None if index is None else self.schedule.prices(drawn)
        found = [self.random.random() < self.repeats for _ in drawn]
        drafts = [8 * (is_found and prices is not None) for is_found in found]
        accepted = [min(self.random.randrange(20), count) for count in drafts]
        asking = ASKING * (index is not None)
        seconds = 1 + asking + FIRST * any(drafts) + EACH * sum(drafts)
        self.asked.append(index is not None)
        self.tokens += NUM_REQS + sum(accepted)
        self.seconds += seconds
        self.schedule.observe(
            StepOutcome(
                index,
                NUM_REQS,
                list(drawn),
                drafts,
                accepted,
                [63] * len(drawn),
                [float(count) for count in drafts],
                seconds * self.random.gauss(1, 0.05),
                num_kept=accepted,
                drafting_seconds=asking * self.slowness,
            )
        )
        if len(self.asked) % 8 == 0:
            self.schedule.forget(self.slots[:1])
            self.slots = [*self.slots[1:], self.slots[-1] + 1]

    def speed(self, num_steps: int) -> float:
        """Tokens a second, where plain decoding emits 1."""
        self.tokens = self.seconds = 0.0
        for _ in range(num_steps):
            self.step()
        return self.tokens / self.seconds / NUM_REQS


def test_an_index_that_finds_nothing_rests() -> None:
    """Red when a text without repeats pays for asking in each step."""
    for seed in range(8):
        serving = Serving(seed)
        assert serving.speed(600) > 1 - 0.4 * ASKING
        assert 0.2 < sum(serving.asked[200:]) / 400 < 0.3, "it is asked now and then"


@pytest.mark.thorough
def test_an_index_that_pays_does_not_rest() -> None:
    """Red when bad luck in a few steps costs what an index brings."""
    for seed in range(8):
        serving = Serving(seed)
        serving.repeats = 0.15
        assert serving.speed(600) > 1.1
        assert sum(serving.asked) > 560


@pytest.mark.thorough
@pytest.mark.parametrize("num_before", [100, 1000])
def test_a_text_that_begins_to_repeat_is_noticed(num_before: int) -> None:
    """Red when what an index found long ago decides for long that it rests."""
    speeds, asked = [], []
    for seed in range(8):
        serving = Serving(seed)
        serving.speed(num_before)
        serving.repeats = 0.3
        speeds.append(serving.speed(64))
        asked.append(sum(serving.asked[-64:]) / 64)
    assert sum(speeds) / 8 > 1.2
    assert sum(asked) / 8 > 0.8


@pytest.mark.thorough
def test_a_text_that_repeats_no_longer_is_noticed() -> None:
    """Red when what an index found long ago decides for long that it is asked."""
    for seed in range(8):
        serving = Serving(seed)
        serving.repeats = 0.1
        serving.speed(600)
        serving.repeats = 0.0
        serving.speed(300)
        assert sum(serving.asked[-100:]) / 100 < 0.4


@pytest.mark.thorough
def test_sampled_requests_are_judged_apart() -> None:
    """Red when what an index brings greedy requests decides for sampled ones."""
    for seed in range(8):
        serving = Serving(seed)
        serving.repeats = 0.3
        serving.speed(600)
        serving.repeats, serving.sampled = 0.0, True
        serving.speed(200)
        assert sum(serving.asked[-100:]) / 100 < 0.4
        serving.repeats, serving.sampled = 0.3, False
        assert serving.speed(40) > 1.3
        assert all(serving.asked[-40:]), "it was forgotten that it pays"


def test_a_new_batch_size_is_asked() -> None:
    """Red when what one batch size showed decides at another, where rows cost less."""
    serving = Serving(0)
    serving.speed(300)
    assert not serving.schedule.asking.pays(8, 1.0)
    assert serving.schedule.asking.pays(1, 1.0)


def test_work_besides_the_index_counts() -> None:
    """Red when what asking takes is more than what the index needs, and is not seen."""
    speeds = []
    for seed in range(8):
        serving = Serving(seed)
        serving.slowness = 0.0
        speeds.append(serving.speed(1200))
    assert sum(speeds) / 8 > 1 - 0.5 * ASKING


def test_asking_is_no_part_of_a_plain_step() -> None:
    """Red when steps in which an index finds nothing make plain ones look slow."""
    plain = []
    for seed in range(8):
        serving = Serving(seed)
        serving.repeats = 0.05
        serving.speed(600)
        plain.append(serving.schedule.costs.plain(NUM_REQS))
    seconds = [known.seconds for known in plain if known is not None]
    assert sum(seconds) / 8 < 1 + 0.3 * ASKING


def test_all_ranks_rest_alike() -> None:
    """Red when a rank rests by its own clock."""
    told: list[list[float]] = []

    def first(seconds: list[float]) -> list[float]:
        told.append(list(seconds))
        return seconds

    serving = Serving(3, first)
    serving.speed(300)
    turn = iter(told)

    def second(_: list[float]) -> list[float]:
        return next(turn)

    other = Serving(3, second)
    other.slowness = 0.0
    other.speed(300)
    assert other.asked == serving.asked
    assert not all(serving.asked)


def test_what_asking_must_bring() -> None:
    """Red when seconds and tokens are not brought to one measure."""
    asking = Asking(MeasuredSchedule([INDEX], 64).steps_at)
    for _ in range(500):
        asking.took(4, 0.05)
        asking.gained(4, 0.3)
    # 4 requests emit 0.2 tokens in 0.05 of a step's seconds
    assert asking.pays(4, plain_seconds=1.0)
    assert not asking.pays(4, plain_seconds=0.5)
