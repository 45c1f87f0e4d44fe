"""From target logits of a mixed batch to vLLM's sampler output."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from vllm.v1.outputs import LogprobsTensors, SamplerOutput
from vllm.v1.sample.metadata import SamplingMetadata

from vllm_treespec.core.tree import TreeBatch
from vllm_treespec.engine.tree_step import TreeStep
from vllm_treespec.scorers import (
    Rule,
    ScorerOutput,
    TargetLogits,
    greedy_matching,
)


def score_trees(
    tree: TreeBatch,
    target: TargetLogits,
    uniforms: Tensor,
    rule: Rule,
) -> ScorerOutput:
    """Score each tree by the rule that suits its request.

    Args:
        tree: the trees.
        target: the target's logits at the nodes.
        uniforms: float64 [num_trees, at least 1 + max_draws] in [0, 1).
        rule: for sampled requests; greedy ones follow the target's likeliest tokens.

    """
    greedy = target.sampling.greedy
    if target.sampling.all_greedy:
        return greedy_matching(tree, target)
    if target.sampling.all_random:
        return rule(tree, target, uniforms)
    path = torch.full_like(tree.parents, -1)
    num_accepted = torch.zeros_like(tree.num_nodes)
    next_token_ids = torch.zeros_like(tree.num_nodes)
    for is_greedy in (True, False):
        rows = (greedy == is_greedy).nonzero()[:, 0]
        part = replace(
            target,
            first_row=target.first_row[rows],
            sampling=replace(
                target.sampling.select(rows),
                all_greedy=is_greedy,
                all_random=not is_greedy,
            ),
        )
        chosen = tree.select(rows)
        if is_greedy:
            scored = greedy_matching(chosen, part)
        else:
            scored = rule(chosen, part, uniforms[rows])
        path[rows, : scored.path.shape[1]] = scored.path
        num_accepted[rows] = scored.num_accepted
        next_token_ids[rows] = scored.next_token_ids
    max_depth = max(int(tree.depths.max()), 1)
    return ScorerOutput(path[:, :max_depth], num_accepted, next_token_ids)


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
