"""The schedule that measures judges an index and a model apart."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest

from tests.fast.test_measured_schedule import Tree, running
from vllm_treespec.schedule.base import StepOutcome
from vllm_treespec.schedule.measured import MeasuredSchedule

BOTH, INDEX_ALONE = 0, 1
TREES = [
    Tree(16, 12, 16, weighs_drafts=True, draft_depth=3),
    Tree(16, 12, 16, weighs_drafts=True, is_free=True),
]


class Chat:
    """Requests; unless it is said, the index finds nothing."""

    def __init__(self, seed: int, model_accepted: float, model_seconds: float) -> None:
        """Take accepted tokens and time of a step with the model; plain takes 1."""
        self.random = random.Random(seed)
        self.schedule = MeasuredSchedule(TREES, 64)
        self.accepted, self.seconds = model_accepted, model_seconds
        # accepted tokens that the index finds
        self.found = 0.0
        # time of a token that the model must catch up on
        self.token_seconds = 0.0
        self.chosen: Counter[int | None] = Counter()
        # requests for which the model was asked
        self.num_asked = 0
        # how much longer a step takes by now; the logarithm
        self.pace = 0.0
        # that the pace is off after many steps, and steps after which it is another one
        self.drift, self.memory = 0.0, 1.0
        # over all steps: their emitted tokens and times, and how long plain ones take
        self.tokens = self.taken = self.plain_taken = 0.0

    def read_prompts(self, count: int) -> None:
        """Answer requests with one token: a tree is chosen, and does not come back."""
        for slot in range(count):
            self.schedule.choose(running([slot]))
            self.schedule.observe(self.outcome(None, [], None))
            self.schedule.forget([slot])

    def answer(
        self, slot: int, num_steps: int, batch_size: int = 1, prompt: int = 0
    ) -> None:
        """Answer requests; a plain step takes 1 whatever their number."""
        requests = range(slot, slot + batch_size)
        behind: dict[int, int] = {}
        for step in range(num_steps):
            num_behind = [behind.get(slot, prompt) for slot in requests]
            index, slots = self.schedule.choose(
                running(requests, num_behind=num_behind)
            )
            self.chosen[index] += 1
            seconds, caught_up = 1.0, 0
            if index == BOTH:
                self.num_asked += sum(slot not in behind for slot in slots)
                caught_up = sum(behind.get(slot, prompt) for slot in slots)
                behind.update((slot, 0) for slot in slots)
                seconds = self.seconds
            if self.chosen[BOTH] < 6:
                # the model's first forwards
                seconds *= 1.3
            seconds *= self.random.gauss(1, 0.04)
            seconds *= self.next_pace()
            seconds += caught_up * self.token_seconds
            timed = seconds if step or caught_up else None
            outcome = self.outcome(index, slots, timed, batch_size)
            self.taken += seconds
            self.tokens += batch_size + sum(outcome.num_accepted)
            self.schedule.observe(replace(outcome, num_caught_up=caught_up))
        self.schedule.forget(requests)

    def next_pace(self) -> float:
        """Let the machine's speed change a little (an Ornstein-Uhlenbeck process)."""
        if self.drift:
            spread = self.drift * math.sqrt(2 / self.memory)
            self.pace += self.random.gauss(0, spread) - self.pace / self.memory
        self.plain_taken += math.exp(self.pace)
        return math.exp(self.pace)

    def outcome(
        self,
        index: int | None,
        slots: Sequence[int],
        seconds: float | None,
        batch_size: int = 1,
    ) -> StepOutcome:
        """What a step brought; its tree has drafts where one of both found some."""
        model_draws = index == BOTH
        index_draws = bool(self.found) and index is not None
        drafts = 4 * (index_draws + model_draws)
        found = [self.draw(self.found) if index_draws else 0 for _ in slots]
        accepted = [have + self.draw(self.accepted) * model_draws for have in found]
        count = len(slots)
        return StepOutcome(
            index,
            batch_size,
            slots,
            [drafts] * count,
            accepted,
            [63] * count,
            [self.found * index_draws + self.accepted * model_draws] * count,
            seconds,
            num_levels=3 if model_draws else 0,
            num_found=found,
        )

    def draw(self, mean: float) -> int:
        """Accepted tokens of one tree, or of a part of it."""
        share = mean / (1 + mean)
        accepted = 0
        while accepted < 12 and self.random.random() < share:
            accepted += 1
        return accepted


@pytest.mark.thorough
@pytest.mark.parametrize("num_read", [0, 3])
def test_an_index_that_finds_nothing_tells_nothing_of_the_model(num_read: int) -> None:
    """Red when what an index finds in a text decides whether a model is asked.

    And when prompts that were read, without an answer, count as steps that could not be
    timed.
    """
    with_model = []
    for seed in range(20):
        chat = Chat(seed, model_accepted=1.5, model_seconds=1.7)
        for slot in range(6):
            chat.read_prompts(num_read)
            chat.answer(10 + slot, 64)
        with_model.append(chat.chosen[BOTH] / chat.chosen.total())
    assert sum(with_model) / len(with_model) > 0.8
    assert sorted(with_model)[1] > 0.4


@pytest.mark.thorough
def test_a_model_that_does_not_pay_is_left_out() -> None:
    """Red when the model is asked because the index says nothing against it."""
    chosen: Counter[int | None] = Counter()
    for seed in range(40):
        chat = Chat(seed, model_accepted=0.4, model_seconds=1.7)
        for slot in range(6):
            chat.answer(10 + slot, 64)
        chosen += chat.chosen
    assert chosen[BOTH] < 0.12 * chosen.total()


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("accepted", "seconds", "memory", "least"),
    [(1.2, 1.9, 30.0, 0.938), (2.0, 2.3, 100.0, 0.988)],
)
def test_times_of_a_machine_whose_speed_changes_are_renewed(
    accepted: float, seconds: float, memory: float, least: float
) -> None:
    """Red when what was slow in a slow minute is not tried in a fast one.

    Every 30 or 100 steps the machine is a third faster or slower. The model brings 1.1
    and 1.2 times as much as the index alone.
    """
    shares = []
    for seed in range(30):
        chat = Chat(seed, accepted, seconds)
        chat.found, chat.drift, chat.memory = 0.1, 0.3, memory
        for number in range(12):
            chat.answer(100 * number, 45, batch_size=8)
        speed = chat.tokens / 8 / chat.taken * chat.plain_taken / (12 * 45)
        shares.append(speed / ((1.1 + accepted) / seconds))
    assert sum(shares) / len(shares) > least


@pytest.mark.thorough
def test_first_times_of_a_cold_machine_are_checked() -> None:
    """Red when plain steps are judged for long by the first few, which were slow.

    The model loses a seventh. Where it is asked, plain steps are not timed.
    """
    chosen: Counter[int | None] = Counter()
    for seed in range(20):
        chat = Chat(seed, model_accepted=0.9, model_seconds=2.1)
        chat.found = 0.1
        for number in range(10):
            chat.answer(100 * number, 45, batch_size=8)
        chosen += chat.chosen
    assert chosen[BOTH] < 0.2 * chosen.total()


@pytest.mark.thorough
def test_what_an_index_finds_gives_no_hope_for_the_model() -> None:
    """Red when what is accepted of both together is learned as one number.

    Edits, of which the index finds much, take turns with answers of which it finds
    nothing. The model adds little to either.
    """
    chosen: Counter[int | None] = Counter()
    for seed in range(20):
        chat = Chat(seed, model_accepted=0.2, model_seconds=1.7)
        for number in range(24):
            chat.found = 0.0 if number % 2 else 3.0
            chat.answer(number, 24)
        chosen += chat.chosen
    assert chosen[BOTH] < 0.07 * chosen.total()


def test_a_model_reads_one_prompt_before_all() -> None:
    """Red when a model that was never timed reads the prompts of a whole batch."""
    chat = Chat(0, model_accepted=0.0, model_seconds=1.7)
    chat.token_seconds = 0.01
    chat.answer(0, 16, batch_size=8, prompt=250)
    assert chat.chosen[BOTH] > 0
    assert chat.num_asked == 1


def test_a_new_batch_size_has_one_prompt_read_first() -> None:
    """Red when a batch size at which a model was not timed has all prompts read.

    With one request the model pays. With 8 its step takes five times as long.
    """
    chat = Chat(0, model_accepted=2.5, model_seconds=1.7)
    chat.token_seconds = 0.01
    for slot in range(4):
        chat.answer(slot, 64, prompt=20)
    asked_before = chat.num_asked
    assert chat.chosen[BOTH] > 0.6 * chat.chosen.total()
    chat.seconds = 8.0
    chat.answer(100, 16, batch_size=8, prompt=250)
    assert chat.num_asked == asked_before + 1


@pytest.mark.thorough
def test_hope_alone_does_not_make_a_model_read_prompts() -> None:
    """Red when each new request has its prompt read, as it may be better than others.

    The model nearly pays, but a prompt takes as long as three steps.
    """
    num_asked = 0
    for seed in range(20):
        chat = Chat(seed, model_accepted=0.6, model_seconds=1.7)
        chat.token_seconds = 0.01
        for number in range(20):
            chat.answer(number, 48, prompt=300)
        num_asked += chat.num_asked
    assert num_asked < 0.55 * 20 * 20


@pytest.mark.thorough
@pytest.mark.parametrize("num_steps", [64, 800])
def test_a_model_that_pays_at_one_batch_size_only(num_steps: int) -> None:
    """Red when the small trees of a large batch tell what one request would accept.

    And when what was learned of a batch size fades while another one runs.
    """
    accepted = {1: 1.2, 4: 0.2}
    with_model: Counter[int] = Counter()
    for seed in range(20):
        chat = Chat(seed, model_accepted=0.0, model_seconds=1.6)
        for number in range(10):
            batch_size = 1 if number % 2 else 4
            chat.accepted = accepted[batch_size]
            before = chat.chosen[BOTH]
            chat.answer(100 * number, num_steps, batch_size)
            if number > 1:
                with_model[batch_size] += chat.chosen[BOTH] - before
    in_all = 20 * 4 * num_steps
    assert with_model[1] > 0.9 * in_all
    assert with_model[4] < 0.1 * in_all


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("prompt", "num_steps", "is_worth_it"),
    [(20, 64, True), (3000, 64, True), (3000, 8, False), (20_000, 64, False)],
)
def test_a_model_that_must_read_a_long_prompt(
    prompt: int, num_steps: int, is_worth_it: bool
) -> None:
    """Red when the time in which a model reads a prompt counts for nothing.

    Or when it is spread over more steps than answers have. A token of the prompt takes
    a hundredth of a step: 3,000 take as long as 30 steps, which the model wins back in
    64 steps, and not in 8.
    """
    with_model = 0
    for seed in range(20):
        chat = Chat(seed, model_accepted=1.5, model_seconds=1.7)
        chat.token_seconds = 0.01
        for number in range(16):
            before = chat.chosen[BOTH]
            chat.answer(number, num_steps, prompt=prompt)
            if number >= 8:
                with_model += chat.chosen[BOTH] > before
    assert with_model > 140 if is_worth_it else with_model < 24
