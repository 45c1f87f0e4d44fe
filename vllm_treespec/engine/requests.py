"""What a request's sampling parameters mean for drafting."""

from __future__ import annotations

from enum import Enum

import torch
from torch import Tensor
from vllm.sampling_params import SamplingParams
from vllm.v1.sample.metadata import SamplingMetadata

from vllm_treespec.sampling import SamplingTensors

GREEDY_BELOW = 1e-5


class Drafting(Enum):
    """What a request's steps draft."""

    TREE = "a tree"
    CHAIN = "a chain"
    NONE = "nothing"


def drafting(params: SamplingParams) -> Drafting:
    """What a request drafts: a tree, a chain, or nothing (it decodes plainly).

    A request whose distribution depends on more than temperature, top-k and top-p
    would need that per node. vLLM masks a grammar's tokens after each token of a
    chain; penalties and other masks it works out for the last token alone.
    """
    if (
        params.presence_penalty
        or params.frequency_penalty
        or params.repetition_penalty != 1.0
        or params.min_p
        or params.min_tokens
        or params.logit_bias
        or params.bad_words
        or params.allowed_token_ids
        or params.logprob_token_ids
        or params.thinking_token_budget is not None
    ):
        return Drafting.NONE
    return Drafting.CHAIN if params.structured_outputs else Drafting.TREE


def sampling_tensors(metadata: SamplingMetadata, reqs: Tensor) -> SamplingTensors:
    """Sampling parameters of some requests of a batch, ``reqs`` int64 [n]."""
    if metadata.all_greedy:
        return SamplingTensors(
            torch.zeros(len(reqs), device=reqs.device), all_greedy=True
        )
    assert metadata.temperature is not None
    temperature = metadata.temperature[reqs]
    greedy = temperature < GREEDY_BELOW
    return SamplingTensors(
        temperature=temperature.masked_fill(greedy, 0.0),
        top_k=None if metadata.top_k is None else metadata.top_k[reqs].long(),
        top_p=None if metadata.top_p is None else metadata.top_p[reqs],
        all_greedy=bool(greedy.all()),
        all_random=not bool(greedy.any()),
    )
