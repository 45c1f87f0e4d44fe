"""From scored trees and plainly sampled requests to vLLM's sampler output."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from vllm.v1.outputs import LogprobsTensors, SamplerOutput
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.sampler import Sampler

from vllm_treespec.batch.matching import PlacedTrees
from vllm_treespec.scorers import ScorerOutput
from vllm_treespec.step.plain_draw import PlainDraw


def has_processed_logprobs(sampler: Sampler) -> bool:
    """Whether logprobs are those that tokens are drawn from.

    Requests that ask for such logprobs have no trees.
    """
    return sampler.logprobs_mode.startswith("processed")


def sampler_output(
    sampler: Sampler,
    metadata: SamplingMetadata,
    logits: Tensor,
    root_rows: Tensor,
    trees: PlacedTrees | None,
    scored: ScorerOutput | None,
    drawn: PlainDraw | None,
) -> SamplerOutput:
    """Put scored trees and requests without a tree together.

    Args:
        sampler: vLLM's sampler, for requests of which nothing is known yet.
        metadata: sampling metadata of the whole batch.
        logits: [num_rows, vocab_size].
        root_rows: int64 [num_reqs], each request's root row.
        trees: of the step, None without any.
        scored: what was accepted of them.
        drawn: tokens of requests without a tree; None: none was drawn.

    """
    num_reqs = len(root_rows)
    left = set(range(num_reqs))
    if drawn is not None:
        left -= set(drawn.host_reqs.tolist())
    width, emitted = 1, None
    if trees is not None and scored is not None:
        left -= set(trees.host_reqs.tolist())
        emitted = scored.emitted(trees.tree)
        width = emitted.shape[1]
    if len(left) == num_reqs:
        # Without drafts all rows are roots. To copy them takes as long as to sample.
        rows = logits if len(logits) == num_reqs else logits[root_rows]
        return sampler(logits=rows, sampling_metadata=metadata)
    processed, logprobs = has_processed_logprobs(sampler), None
    tokens = root_rows.new_full((num_reqs, width), -1)
    if left:
        plain = sampler(
            logits=logits[root_rows],
            sampling_metadata=replace(
                metadata,
                generators={r: g for r, g in metadata.generators.items() if r in left},
                max_num_logprobs=metadata.max_num_logprobs if processed else None,
            ),
        )
        tokens[:, :1] = plain.sampled_token_ids
        if processed and plain.logprobs_tensors is not None:
            logprobs = for_every_token(plain.logprobs_tensors, width)
    if drawn is not None:
        tokens[drawn.reqs, 0] = drawn.token_ids
    if trees is not None and emitted is not None:
        tokens[trees.reqs] = emitted
    wanted = metadata.max_num_logprobs is not None or metadata.logprob_token_ids
    if wanted and not processed:
        rows = root_rows[:, None].repeat(1, width)
        if trees is not None and scored is not None:
            rows[trees.reqs, 1:] += scored.path.clamp(min=0)
        logprobs = emitted_logprobs(sampler, metadata, logits, rows, tokens)
    return SamplerOutput(tokens.int(), logprobs)


def for_every_token(tensors: LogprobsTensors, width: int) -> LogprobsTensors:
    """Repeat each request's row for all tokens that a request may emit in the step.

    Requests that ask for logprobs emit one token, and the others' are not shown.
    """
    return LogprobsTensors(
        tensors.logprob_token_ids.repeat_interleave(width, 0),
        tensors.logprobs.repeat_interleave(width, 0),
        tensors.selected_token_ranks.repeat_interleave(width, 0),
    )


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
