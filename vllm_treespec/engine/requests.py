"""What a request's sampling parameters mean for drafting."""

from __future__ import annotations

import torch
from torch import Tensor
from vllm.sampling_params import SamplingParams
from vllm.v1.sample.metadata import SamplingMetadata

from vllm_treespec.sampling import SamplingTensors

GREEDY_BELOW = 1e-5


def drafts_tree(params: SamplingParams, reasons: bool = False) -> bool:
    """Whether a request drafts trees; otherwise it decodes plainly.

    A request whose distribution depends on more than temperature, top-k and top-p
    would need that per node. A grammar's masks our scheduler fills per node;
    penalties and other masks vLLM works out for the last token alone.

    Args:
        params: of the request.
        reasons: whether a grammar begins at the end of some reasoning only, which
            vLLM looks for along one path.

    """
    return not (
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
        or (reasons and params.structured_outputs)
    )


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
