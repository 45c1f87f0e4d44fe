"""The prefix cache with draft trees on the V2 runner, and prompts in parts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import pytest
from vllm.outputs import RequestOutput

from tests.engine.child import sessions
from tests.v2.engines import GREEDY, Engine, engine
from tests.v2.prompts import PARAMS
from tests.v2.test_trees import INDEX, accepted

NUM_TOKENS = 8
DEPTH = 3
BLOCK = 16
# Three blocks that all prompts share, and ends within a block, at one and behind one.
SHARED = [(31 * j) % 250 + 3 for j in range(3 * BLOCK)]
PROMPTS = [
    [*SHARED, *((17 * i + 5 * j) % 250 + 3 for j in range(length))]
    for i, length in enumerate((1, 9, 16, 33, 4))
]
SESSIONS: dict[str, Any] = {
    "prompts": [PROMPTS[1]] * 3,
    "more": [5, 9, 13, 17, 21, 25, 29],
    "params": [
        {**GREEDY, "max_tokens": count, "ignore_eos": True, "detokenize": False}
        for count in (5, 6, 7)
    ],
}


@pytest.fixture(scope="module")
def stock(target: str) -> dict[str, Any]:
    """What stock vLLM answers, by kind of request, and to sessions."""
    with engine(target, enable_prefix_caching=True) as plain:
        return {
            "greedy": plain.generate(PROMPTS, PARAMS["greedy"], NUM_TOKENS),
            "sampled": plain.generate(PROMPTS, PARAMS["sampled"], NUM_TOKENS),
            "sessions": sessions(plain.llm, SESSIONS),
        }


def answers_from_cache(running: Engine, kind: str) -> list[list[int]]:
    """Answer the prompts, which are in the cache: of one all but its last token."""
    outputs = running.outputs(PROMPTS, PARAMS[kind], NUM_TOKENS)
    cached = [output.num_cached_tokens for output in outputs]
    assert cached == [(len(prompt) - 1) // BLOCK * BLOCK for prompt in PROMPTS]
    return [list(output.outputs[0].token_ids) for output in outputs]


@pytest.fixture(scope="module")
def index(target: str, stock: object) -> Iterator[Engine]:
    """An engine with a suffix index."""
    with engine(target, INDEX, enable_prefix_caching=True) as running:
        yield running


def test_cached_prefixes(index: Engine, stock: dict[str, Any]) -> None:
    """Red when a cached block has KV of rejected nodes, or texts begin behind it."""
    assert index.generate(PROMPTS, GREEDY, NUM_TOKENS) == stock["greedy"]
    for _ in range(2):
        assert answers_from_cache(index, "sampled") == stock["sampled"]
    assert accepted(index) > 2 * NUM_TOKENS


def test_sessions(index: Engine, stock: dict[str, Any]) -> None:
    """Red when a turn goes on elsewhere, or beside drafts of the turn before."""
    found = sessions(index.llm, SESSIONS)
    for expected, answer in zip(stock["sessions"], found, strict=True):
        for name in ("session", "token_ids", "num_cached_tokens"):
            assert answer[name] == expected[name]
    assert accepted(index) > NUM_TOKENS


def test_reset_of_the_cache(index: Engine, stock: dict[str, Any]) -> None:
    """Red when requests that are preempted, and go on in the same step, are lost."""
    llm_engine = index.llm.llm_engine
    stock_step, steps = llm_engine.step, []

    def step() -> list[RequestOutput]:
        steps.append(len(index.scheduler.running))
        if len(steps) in (4, 7):
            llm_engine.reset_prefix_cache(reset_running_requests=True)
        return stock_step()

    before = index.count("num_preemptions")
    with patch.object(llm_engine, "step", step):
        answers = index.generate(PROMPTS, PARAMS["sampled"], NUM_TOKENS)
    assert index.count("num_preemptions") > before
    assert answers == stock["sampled"]


def test_cached_prefixes_of_draft_models(target: str, stock: dict[str, Any]) -> None:
    """Red when a draft model reads a cached block that it never wrote.

    The target drafts for itself: of its likeliest path at most the last draft may be
    missing from the tree.
    """
    spec = {
        "method": "hybrid",
        "model": target,
        "num_drafts": 10,
        "top_k": 2,
        "model_depth": DEPTH,
        "min_probability": 0.0,
        "max_cached_tokens": 0,
        "schedule": "fixed",
    }
    with engine(target, spec, enable_prefix_caching=True) as running:
        assert running.generate(PROMPTS, GREEDY, NUM_TOKENS) == stock["greedy"]
        stats = running.runner.decoder.stats
        stats.reset()
        assert answers_from_cache(running, "greedy") == stock["greedy"]
        found = stats.as_dict()["accepted"]
    assert min(found) >= DEPTH - 1
    assert found[DEPTH] > len(PROMPTS)
