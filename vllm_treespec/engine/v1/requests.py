"""What a request's sampling parameters mean for drafting."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm.sampling_params import SamplingParams

from vllm_treespec.core.sampling import SamplingTensors

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


def sampling_tensors(
    batch: Any, host_reqs: np.ndarray, reqs: Tensor
) -> SamplingTensors:
    """Sampling parameters of some requests of a batch.

    Args:
        batch: vLLM's input batch, with its sampling metadata up to date.
        host_reqs: int64 [n], batch indices of the requests.
        reqs: the same on the device.

    """
    metadata = batch.sampling_metadata
    greedy_reqs = batch.temperature_cpu[host_reqs] < GREEDY_BELOW
    if greedy_reqs.all():
        return SamplingTensors(
            torch.zeros(len(reqs), device=reqs.device), all_greedy=True
        )
    temperature = metadata.temperature[reqs]
    return SamplingTensors(
        temperature=temperature.masked_fill(temperature < GREEDY_BELOW, 0.0),
        top_k=None if metadata.top_k is None else metadata.top_k[reqs].long(),
        top_p=None if metadata.top_p is None else metadata.top_p[reqs],
        all_random=not greedy_reqs.any(),
    )
