"""From scored trees and plain requests to vLLM's sampler output."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from vllm.v1.outputs import LogprobsTensors, SamplerOutput
from vllm.v1.sample.metadata import SamplingMetadata

from vllm_treespec.engine.tree_step import TreeStep


def with_plain_samples(
    sampler: Any,
    metadata: SamplingMetadata,
    logits: Tensor,
    first_row: Tensor,
    step: TreeStep,
) -> SamplerOutput:
    """Put scored trees and plainly sampled requests into one sampler output.

    Args:
        sampler: vLLM's sampler, for requests without a tree.
        metadata: sampling metadata of the whole batch.
        logits: [num_rows, vocab_size].
        first_row: int64 [num_reqs], each request's root row.
        step: trees and what the scorer accepted of them.

    """
    scored = step.scored
    assert scored is not None
    num_reqs = len(first_row)
    emitted = scored.emitted(step.tree)
    tokens = emitted.new_full((num_reqs, emitted.shape[1]), -1)
    if len(step.host_reqs) < num_reqs:
        scored_reqs = set(step.host_reqs.tolist())
        others = {r: g for r, g in metadata.generators.items() if r not in scored_reqs}
        plain = sampler(
            logits=logits[first_row],
            sampling_metadata=replace(
                metadata, generators=others, max_num_logprobs=None
            ),
        )
        tokens[:, :1] = plain.sampled_token_ids
    tokens[step.reqs] = emitted
    logprobs = None
    if metadata.max_num_logprobs is not None or metadata.logprob_token_ids:
        rows = first_row[:, None].repeat(1, tokens.shape[1])
        rows[step.reqs, 1:] += scored.path.clamp(min=0)
        logprobs = emitted_logprobs(sampler, metadata, logits, rows, tokens)
    return SamplerOutput(tokens.int(), logprobs)


def emitted_logprobs(
    sampler: Any,
    metadata: SamplingMetadata,
    logits: Tensor,
    rows: Tensor,
    tokens: Tensor,
) -> LogprobsTensors:
    """Log probabilities of emitted tokens, each at the node it was emitted after.

    Args:
        sampler: vLLM's sampler.
        metadata: how many top tokens, or which tokens, to report besides.
        logits: [num_rows, vocab_size].
        rows: int64 [num_reqs, max_emitted], logits row of each emitted token.
        tokens: int64 [num_reqs, max_emitted], padded with -1.

    """
    used = logits[rows.flatten()]
    if sampler.logprobs_mode == "raw_logits":
        values = used.to(torch.float32)
    else:
        values = sampler.compute_logprobs(used)
    emitted = tokens.flatten().clamp(min=0)
    if metadata.logprob_token_ids:
        # Like vLLM, for the whole batch. Such requests emit one token a step.
        width = tokens.shape[1]
        chosen = {req * width: ids for req, ids in metadata.logprob_token_ids.items()}
        return sampler.gather_specific_token_logprobs(values, chosen, emitted)
    return sampler.gather_logprobs(values, metadata.max_num_logprobs, emitted)
