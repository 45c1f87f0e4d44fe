"""Log-likelihoods of answers under the target; imported by engine processes."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from vllm import SamplingParams
from vllm.inputs import tokens_input

from vllm_treespec.tools.side_engine import SideEngine


def mean_logprobs(engine: SideEngine, answers: Sequence[Sequence[int]]) -> list[float]:
    """Mean log-likelihood per token of one answer per prompt, at temperature 1."""
    prompts = [prompt["prompt_token_ids"] for prompt in engine.prompts]
    both = zip(prompts, answers, strict=True)
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
    outputs = engine.llm.generate(
        [tokens_input(prompt + list(answer)) for prompt, answer in both],
        params,
        use_tqdm=False,
    )
    means = []
    for output, answer in zip(outputs, answers, strict=True):
        found: Any = output.prompt_logprobs
        steps = zip(found[-len(answer) :], answer, strict=True)
        means.append(statistics.fmean(step[token].logprob for step, token in steps))
    return means
