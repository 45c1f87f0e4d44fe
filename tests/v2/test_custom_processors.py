"""Custom logits processors on the V2 runner."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from vllm import SamplingParams
from vllm.v1.worker.gpu.sample.logits_processor import LogitsContext, LogitsProcessor

from tests.v2.engines import engine
from tests.v2.prompts import PARAMS, PROMPTS
from tests.v2.test_trees import INDEX, accepted

NUM_TOKENS = 10
ASKED = {**PARAMS["sampled"], "extra_args": {"up": True}}


class Up(LogitsProcessor):
    """Prefers tokens above the last two of a text, where a request asks for it."""

    def __init__(self, vllm_config: Any, req_states: Any) -> None:
        """Begin without requests."""
        self.asked = torch.zeros(req_states.max_num_reqs)

    def add_request(self, req_idx: int, sampling_params: SamplingParams) -> bool:
        """Note who asks."""
        self.asked[req_idx] = asks = bool((sampling_params.extra_args or {}).get("up"))
        return asks

    def apply(self, logits: Tensor, ctx: LogitsContext) -> Tensor:
        """Read the row before as the token before."""
        before = ctx.input_ids.roll(1).where(ctx.expanded_local_pos > 0, 0)
        least = torch.maximum(ctx.input_ids, before)
        rises = torch.arange(logits.shape[1]) > least[:, None]
        return logits.add_(2 * rises * self.asked[ctx.expanded_idx_mapping, None])


def test_requests_that_are_changed_decode_plainly(
    target: str, expected: dict[str, list[list[int]]]
) -> None:
    """Red when a custom processor reads nodes of a tree as a chain.

    Or when requests that it leaves alone have no trees for it.
    """
    params = [ASKED, PARAMS["sampled"], ASKED, PARAMS["sampled"]]
    with engine(target, logits_processors=[Up]) as plain:
        answers = plain.generate(PROMPTS, params, NUM_TOKENS)
    assert answers[0] != expected["sampled"][0][:NUM_TOKENS]
    assert answers[1] == expected["sampled"][1][:NUM_TOKENS]
    with engine(target, INDEX, logits_processors=[Up]) as running:
        for _ in range(2):
            assert running.generate(PROMPTS, params, NUM_TOKENS) == answers
        assert accepted(running) > NUM_TOKENS
        running.generate(PROMPTS[:1], ASKED, NUM_TOKENS)
        assert running.runner.decoder.stats.as_dict()["trees"] == 0
