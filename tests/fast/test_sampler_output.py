"""Tokens of requests without a tree: ours, and those of vLLM's sampler."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from vllm_treespec.engine.v1.sampler_output import sampler_output
from vllm_treespec.step.plain_draw import PlainDraw


@dataclass(frozen=True)
class Metadata:
    """As much of vLLM's sampling metadata as is read."""

    generators: dict[int, str] = field(default_factory=dict)
    max_num_logprobs: int | None = None
    logprob_token_ids: dict[int, list[int]] | None = None


class CountingSampler:
    """Emits 70, 71, ... and notes whose generators it was given."""

    logprobs_mode = "raw_logprobs"

    def __init__(self) -> None:
        """Begin without a call."""
        self.generators: list[set[int]] = []

    def __call__(self, logits: Tensor, sampling_metadata: Metadata) -> Any:
        """Sample all rows."""
        self.generators.append(set(sampling_metadata.generators))
        tokens = 70 + torch.arange(len(logits), dtype=torch.int32)
        return SimpleNamespace(sampled_token_ids=tokens[:, None])


def plain_draw(tokens: dict[int, int]) -> PlainDraw:
    """Tokens of requests by their places."""
    reqs = torch.tensor(list(tokens))
    return PlainDraw(reqs.numpy(), reqs, torch.tensor(list(tokens.values())))


def emitted(drawn: dict[int, int] | None, sampler: Any) -> list[list[int]]:
    """Tokens of three requests without a tree, each with a generator."""
    metadata: Any = Metadata({0: "a", 1: "b", 2: "c"})
    found = sampler_output(
        sampler,
        metadata,
        torch.zeros(3, 9),
        torch.arange(3),
        None,
        None,
        None if drawn is None else plain_draw(drawn),
    )
    assert found.sampled_token_ids.dtype == torch.int32
    return found.sampled_token_ids.tolist()


def test_the_sampler_rests_where_all_is_drawn() -> None:
    """Red when tokens are drawn twice."""
    sampler = CountingSampler()
    assert emitted({0: 5, 1: 6, 2: 7}, sampler) == [[5], [6], [7]]
    assert not sampler.generators


def test_the_sampler_draws_for_the_others() -> None:
    """Red when a request gets another one's token, or its generator moves in vain."""
    sampler = CountingSampler()
    assert emitted({0: 5, 2: 7}, sampler) == [[5], [71], [7]]
    assert sampler.generators == [{1}]


def test_without_draws_a_step_is_the_samplers() -> None:
    """Red when a step in which nothing is drawn copies its logits."""
    sampler = CountingSampler()
    assert emitted(None, sampler) == [[70], [71], [72]]
    assert sampler.generators == [{0, 1, 2}]
