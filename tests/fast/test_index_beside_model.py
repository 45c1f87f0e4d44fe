"""The schedule that measures judges an index and a model apart."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest

from tests.fast.test_measured_schedule import Tree, running
from vllm_treespec.core.measured import MeasuredSchedule
from vllm_treespec.core.schedule import StepOutcome

BOTH, INDEX_ALONE = 0, 1
TREES = [
    Tree(16, 12, 16, weighs_drafts=True),
    Tree(16, 12, 16, weighs_drafts=True, is_free=True),
]


class Chat:
    """Requests of 64 steps; the index finds next to nothing, the model guesses well."""

    def __init__(self, seed: int, model_accepted: float, model_seconds: float) -> None:
        """Take accepted tokens and time of a step with the model; plain takes 1."""
        self.random = random.Random(seed)
        self.schedule = MeasuredSchedule(TREES, 64)
        self.accepted, self.seconds = model_accepted, model_seconds
        # time of a token that the model must catch up on
        self.token_seconds = 0.0
        self.chosen: Counter[int | None] = Counter()

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
        for step in range(num_steps):
            behind = [prompt] * batch_size
            index, slots = self.schedule.choose(running(requests, num_behind=behind))
            self.chosen[index] += 1
            seconds, caught_up = 1.0, 0
            if index == BOTH:
                seconds, caught_up, prompt = self.seconds, sum(behind), 0
            if self.chosen[BOTH] < 6:
                # the model's first forwards
                seconds *= 1.3
            seconds *= self.random.gauss(1, 0.04)
            seconds += caught_up * self.token_seconds
            timed = seconds if step or caught_up else None
            outcome = self.outcome(index, slots, timed, batch_size)
            self.schedule.observe(replace(outcome, num_caught_up=caught_up))
        self.schedule.forget(requests)

    def outcome(
        self,
        index: int | None,
        slots: Sequence[int],
        seconds: float | None,
        batch_size: int = 1,
    ) -> StepOutcome:
        """What a step brought; its tree has drafts where the model drew it."""
        drafts = 4 if index == BOTH else 0
        accepted = [self.draw() if drafts else 0 for _ in slots]
        count = len(slots)
        return StepOutcome(
            index,
            batch_size,
            slots,
            [drafts] * count,
            accepted,
            [63] * count,
            [self.accepted * (drafts > 0)] * count,
            seconds,
            num_levels=3 if drafts else 0,
        )

    def draw(self) -> int:
        """Accepted tokens of one tree of the model."""
        share = self.accepted / (1 + self.accepted)
        accepted = 0
        while accepted < 12 and self.random.random() < share:
            accepted += 1
        return accepted


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
    assert min(with_model) > 0.25


def test_a_model_that_does_not_pay_is_left_out() -> None:
    """Red when the model is asked because the index says nothing against it."""
    for seed in range(20):
        chat = Chat(seed, model_accepted=0.4, model_seconds=1.7)
        for slot in range(6):
            chat.answer(10 + slot, 64)
        assert chat.chosen[BOTH] < 0.2 * chat.chosen.total()


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
