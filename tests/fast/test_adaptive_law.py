"""Whose trees are drawn follows the clock; what is emitted follows the target's law."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor

from tests.fast.chi_square import p_value, text_law
from tests.fast.toy_workloads import Scheduled
from vllm_treespec.batch.views import EmittedBatch
from vllm_treespec.proposers import RsdS
from vllm_treespec.schedule.base import Schedule
from vllm_treespec.schedule.listed import ListedSchedule
from vllm_treespec.schedule.scheduler import AdaptiveScheduler
from vllm_treespec.scorers import RULES
from vllm_treespec.sources.base import Sources
from vllm_treespec.step.method import Method
from vllm_treespec.testing.fake_engine import FakeEngine
from vllm_treespec.testing.fake_scheduler import Habits, Request
from vllm_treespec.testing.toy_models import VOCAB_SIZE, Language, ToyDraftModel

HABIT = Habits(token_budget=400, max_running=16)
MAX_TOKENS = 6


class Peeking(FakeEngine):
    """Sends a tree only where its first draft is an even token."""

    def _draft(self, batch: EmittedBatch) -> None:
        """Draw the next trees, and drop some for what was drawn."""
        super()._draft(batch)
        for request in self.now.requests:
            if request.proposed and request.proposed[0] % 2:
                request.proposed = []


def found_by(
    engine_class: type[FakeEngine],
    make_schedule: Callable[..., Schedule],
    limits: tuple[int, ...] = (63,),
) -> tuple[FakeEngine, Tensor]:
    """Answer a thousand times; numbers of the answers, int64 [1008].

    Requests take their limits of draft tokens in turn; 0: they decode plainly.
    """
    language = Language(0)
    proposers = [RsdS(1, 1), RsdS(3, 3)]
    trees = [Scheduled(1000, proposer.sizes) for proposer in proposers]
    rule = RULES["recursive_rejection"]
    method = Method(make_schedule(trees), proposers, rule, False, 16)
    sources = Sources([ToyDraftModel(language)])
    engine = engine_class(language, method, sources, HABIT, 0)
    engine.decoder.clock.clock = random_clock(engine)
    request = Request("", [1, 2], max_tokens=MAX_TOKENS, temperature=1.0)
    many = [replace(request, name=str(i), token_ids=[1, 2]) for i in range(1008)]
    for i, one in enumerate(many):
        one.max_drafts = limits[i % len(limits)]
        one.drafts = one.max_drafts > 0
    answers: list[list[int]] = []
    for first in range(0, len(many), 16):
        answers += engine.run(*many[first : first + 16])
    places = VOCAB_SIZE ** torch.arange(1, -1, -1)
    return engine, (torch.tensor(answers)[:, :2] * places).sum(1)


def random_clock(engine: FakeEngine) -> Callable[[], float]:
    """A clock by which steps of all options take about as long."""
    source = random.Random(0)
    ends = [0.0]

    def now() -> float:
        while len(ends) <= engine.decoder.step:
            ends.append(ends[-1] + source.uniform(0.5, 1.5))
        return ends[engine.decoder.step]

    return now


@pytest.mark.thorough
def test_choosing_by_the_clock_keeps_the_law() -> None:
    """Red when the schedule sees what was drawn."""
    engine, found = found_by(FakeEngine, partial(AdaptiveScheduler, max_trees=16))
    trees = {index for _, index in engine.drawn} - {None}
    assert len(trees) == 2, "one tree was always drawn"
    assert engine.decoder.stats.as_dict()["mode_seconds"]
    assert p_value(found, text_law(engine.language, [1, 2], 2)) > 1e-4


@pytest.mark.thorough
def test_limits_of_requests_keep_the_law() -> None:
    """Red when the schedule, which knows limits, lets draws decide over trees."""
    make = partial(AdaptiveScheduler, max_trees=16)
    engine, found = found_by(FakeEngine, make, limits=(63, 2, 0, 5, 1))
    assert {index for _, index in engine.drawn} >= {0, 1}
    assert p_value(found, text_law(engine.language, [1, 2], 2)) > 1e-4


@pytest.mark.thorough
def test_choosing_by_the_draws_is_noticed() -> None:
    """Red when this test could not tell a schedule that looks at the draws."""
    engine, found = found_by(Peeking, ListedSchedule)
    second = text_law(engine.language, [1, 2], 2).view(VOCAB_SIZE, VOCAB_SIZE).sum(0)
    parity = torch.stack([second[::2].sum(), second[1::2].sum()])
    assert p_value(found % VOCAB_SIZE % 2, parity) < 1e-4
