"""What the fake engine runs: habits of a scheduler, and requests."""

from __future__ import annotations

import random

from vllm_treespec.testing.fake_engine import FakeEngine
from vllm_treespec.testing.fake_scheduler import Habits, Request
from vllm_treespec.testing.toy_models import VOCAB_SIZE

HABITS = {
    "whole": Habits(),
    "cut": Habits(cut=0.5),
    "lost": Habits(lose=0.3, other=0.3),
    "late": Habits(skip=0.3),
    "preempted": Habits(preempt=0.15),
    "chunked prompts": Habits(chunk=5, token_budget=17),
    "small budget": Habits(token_budget=13),
    "few blocks": Habits(num_blocks=40),
    "all": Habits(
        cut=0.2,
        lose=0.1,
        other=0.1,
        skip=0.1,
        preempt=0.05,
        chunk=9,
        token_budget=30,
        num_blocks=60,
    ),
}


def workload(seed: int, num_reqs: int = 10) -> list[Request]:
    """Requests some of which begin alike."""
    rng = random.Random(seed)
    beginnings = [[rng.randrange(VOCAB_SIZE) for _ in range(16)] for _ in range(3)]
    requests = []
    for number in range(num_reqs):
        prompt = rng.choice(beginnings)[: rng.randrange(1, 17)]
        prompt = prompt + [rng.randrange(VOCAB_SIZE) for _ in range(rng.randrange(9))]
        requests.append(Request(f"r{number}", prompt, rng.randrange(1, 40)))
    return requests


def check_greedy(engine: FakeEngine, requests: list[Request]) -> None:
    """Run requests, and compare with plain decoding."""
    prompts = [list(r.token_ids) for r in requests]
    answers = engine.run(*requests)
    for prompt, request, answer in zip(prompts, requests, answers, strict=True):
        expected = engine.language.greedy(
            prompt, request.max_tokens, request.penalties, request.forbidden
        )
        assert answer == expected
