"""Stock vLLM on the V2 runner, without drafts: what all later tests compare with."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.v2.engines import Engine, engine
from tests.v2.prompts import PROMPTS, greedy_answers

SAMPLED: dict[str, Any] = {"temperature": 1.0, "top_k": 40, "top_p": 0.95}


@pytest.fixture(scope="module")
def plain(target: str) -> Iterator[Engine]:
    """An engine without drafts."""
    with engine(target) as running:
        yield running


def test_runs_the_v2_runner_with_async_scheduling(plain: Engine) -> None:
    """Red when the harness runs something else than a GPU would."""
    assert plain.config.use_v2_model_runner
    assert type(plain.scheduler).__name__ == "AsyncScheduler"
    assert plain.core.batch_queue_size == 2


def test_greedy_answers_equal_transformers(plain: Engine, target: str) -> None:
    """Red when a stand-in computes something else, alone or in mixed batches.

    A prompt comes in chunks beside requests that decode, and a request waits for
    another one's end.
    """
    assert plain.generate(PROMPTS) == greedy_answers(target, PROMPTS)
    chunks = [n for step in plain.steps for n in step.num_tokens.values() if n > 1]
    assert len(chunks) > len(PROMPTS), "no prompt came in chunks"
    assert any(
        max(step.num_tokens.values()) > 1 and 1 in step.num_tokens.values()
        for step in plain.steps
    ), "no chunk came beside a request that decodes"


def test_sampled_answers_repeat(plain: Engine) -> None:
    """Red when noise depends on anything but a request's seed and position."""
    prompts = PROMPTS[:3]
    params = [{**SAMPLED, "seed": seed} for seed in (1, 2, 3)]
    answers = plain.generate(prompts, params, max_tokens=8)
    again = plain.generate(prompts[::-1], params[::-1], max_tokens=8)
    assert again[::-1] == answers
    others = [{**SAMPLED, "seed": seed} for seed in (4, 5, 6)]
    assert plain.generate(prompts, others, max_tokens=8) != answers
