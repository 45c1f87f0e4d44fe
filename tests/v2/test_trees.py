"""Draft trees on the V2 runner: text equals stock vLLM's token for token."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.v2.engines import Engine, engine

# More than run at once, and one that is read in chunks.
PROMPTS = [
    [(37 * i + 11 * j) % 250 + 3 for j in range(length)]
    for i, length in enumerate((5, 23, 60, 11))
]
NUM_TOKENS = 24
PARAMS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "sampled": {"temperature": 1.0, "seed": 11},
    "narrow": {"temperature": 0.8, "top_p": 0.9, "top_k": 20, "seed": 5},
}
INDEX = {
    "method": "suffix_tree",
    "num_drafts": 11,
    "depth": 8,
    "min_probability": 0.0,
    "schedule": "fixed",
}


@pytest.fixture(scope="module")
def expected(target: str) -> dict[str, list[list[int]]]:
    """What stock vLLM answers, by kind of request."""
    with engine(target) as plain:
        return {
            kind: plain.generate(PROMPTS, params, NUM_TOKENS)
            for kind, params in PARAMS.items()
        }


@pytest.fixture(scope="module")
def index(target: str, expected: object) -> Iterator[Engine]:
    """An engine with a suffix index."""
    with engine(target, INDEX) as running:
        yield running


def accepted(running: Engine) -> int:
    """Draft tokens that were accepted since the last call."""
    stats = running.runner.decoder.stats
    found = stats.as_dict()["accepted"]
    stats.reset()
    return sum(drafts * trees for drafts, trees in found.items())


def test_runs_on_the_v2_runner(index: Engine) -> None:
    """Red when draft trees turn vLLM's defaults off: its runner, or async scheduling."""
    assert index.config.use_v2_model_runner
    assert index.config.scheduler_config.async_scheduling
    assert type(index.scheduler).__name__ == "TreeAsyncScheduler"
    assert index.core.batch_queue_size == 2


@pytest.mark.parametrize("turn", ["first", "answers are in the index"])
@pytest.mark.parametrize("kind", PARAMS)
def test_text_equals_plain(
    index: Engine, expected: dict[str, list[list[int]]], kind: str, turn: str
) -> None:
    """Red when positions, masks, commit, noise or the host's texts are off."""
    answers = index.generate(PROMPTS, PARAMS[kind], NUM_TOKENS)
    assert answers == expected[kind]
    if turn != "first":
        assert accepted(index) > NUM_TOKENS
