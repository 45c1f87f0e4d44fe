"""From scored trees and plainly sampled requests to vLLM's sampler output."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from vllm.v1.outputs import LogprobsTensors, SamplerOutput
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.sampler import Sampler

from vllm_treespec.core.matching import RunningTrees
from vllm_treespec.scorers import ScorerOutput


def sampler_output(
    sampler: Sampler,
    metadata: SamplingMetadata,
    logits: Tensor,
    root_rows: Tensor,
    trees: RunningTrees | None,
    scored: ScorerOutput | None,
) -> SamplerOutput:
    """Put scored trees and plainly sampled requests together.

    Args:
        sampler: vLLM's sampler, for requests without a tree.
        metadata: sampling metadata of the whole batch.
        logits: [num_rows, vocab_size].
        root_rows: int64 [num_reqs], each request's root row.
        trees: of the step, None without any.
        scored: what was accepted of them.

    """
    if trees is None or scored is None:
        return sampler(logits=logits[root_rows], sampling_metadata=metadata)
    num_reqs = len(root_rows)
    emitted = scored.emitted(trees.tree)
    tokens = emitted.new_full((num_reqs, emitted.shape[1]), -1)
    if len(trees.host_reqs) < num_reqs:
        scored_reqs = set(trees.host_reqs.tolist())
        others = {r: g for r, g in metadata.generators.items() if r not in scored_reqs}
        plain = sampler(
            logits=logits[root_rows],
            sampling_metadata=replace(
                metadata, generators=others, max_num_logprobs=None
            ),
        )
        tokens[:, :1] = plain.sampled_token_ids
    tokens[trees.reqs] = emitted
    logprobs = None
    if metadata.max_num_logprobs is not None or metadata.logprob_token_ids:
        rows = root_rows[:, None].repeat(1, tokens.shape[1])
        rows[trees.reqs, 1:] += scored.path.clamp(min=0)
        logprobs = emitted_logprobs(sampler, metadata, logits, rows, tokens)
    return SamplerOutput(tokens.int(), logprobs)


def emitted_logprobs(
    sampler: Sampler,
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
