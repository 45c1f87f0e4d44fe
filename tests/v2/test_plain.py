"""Stock vLLM on the V2 runner, without drafts: what all later tests compare with."""

from collections.abc import Iterator

import pytest
import torch
from transformers import LlamaForCausalLM

from tests.v2.engines import Engine, engine

PROMPTS = [
    [(37 * i + 11 * j) % 250 + 3 for j in range(length)]
    for i, length in enumerate((5, 23, 60, 11))
]


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


def test_equals_transformers(plain: Engine, target: str) -> None:
    """Red when a stand-in computes something else."""
    model = LlamaForCausalLM.from_pretrained(target).eval()
    answers = plain.generate(PROMPTS)
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        text = torch.tensor([prompt])
        expected = model.generate(
            text, max_new_tokens=len(answer), do_sample=False, eos_token_id=None
        )
        assert answer == expected[0, len(prompt) :].tolist()
