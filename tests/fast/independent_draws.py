"""Uniforms that make a proposer draw with replacement each of its trees once."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tests.fast.enumeration import Weighted
from tests.fast.languages import Language, LanguageDraft, plain_sampling
from vllm_treespec.proposers import ProposerInputs, SpecInfer
from vllm_treespec.sampling.laws import SamplingTensors
from vllm_treespec.trees.tree import TreeBatch

PARTS = 8


def propose(
    proposer: SpecInfer,
    models: Sequence[Language],
    uniforms: Tensor,
    sampling: SamplingTensors | None = None,
    vocabulary: Tensor | None = None,
) -> TreeBatch:
    """Let a proposer draw one tree per row of ``uniforms``."""
    num_reqs = len(uniforms)
    return proposer.propose(
        ProposerInputs(
            root_token_ids=torch.zeros(num_reqs, dtype=torch.int64),
            sampling=sampling or plain_sampling(num_reqs),
            uniforms=uniforms,
            draft_models=[
                LanguageDraft(model, num_reqs, vocabulary) for model in models
            ],
        )
    )


def all_trees(
    proposer: SpecInfer, models: Sequence[Language], vocabulary: Tensor | None = None
) -> Weighted:
    """Every tree the proposer can draw, drawn by the proposer itself."""
    uniforms = torch.zeros((1, 0), dtype=torch.float64)
    weights = torch.ones(1, dtype=torch.float64)
    for model, factors in zip(models, proposer.branching_factors, strict=True):
        own, mass = model_uniforms(model, factors)
        before = len(weights)
        uniforms = torch.cat(
            [uniforms.repeat_interleave(len(own), dim=0), own.repeat(before, 1)], dim=1
        )
        weights = weights.repeat_interleave(len(own)) * mass.repeat(before)
    tree = propose(proposer, models, uniforms, vocabulary=vocabulary)
    return Weighted(tree, weights)


def model_uniforms(model: Language, factors: Sequence[int]) -> tuple[Tensor, Tensor]:
    """One model's uniforms, the middles of all tokens' intervals, and their mass."""
    uniforms = torch.zeros((1, 0), dtype=torch.float64)
    weights = torch.ones(1, dtype=torch.float64)
    above = torch.zeros((1, 1), dtype=torch.int64)
    for count in factors:
        below = torch.zeros((len(weights), 0), dtype=torch.int64)
        for draw in range(above.shape[1] * count):
            prefix = above[:, draw // count]
            law = model.table[prefix]
            which, token = (law > 0).nonzero(as_tuple=True)
            middle = (law.cumsum(1) - law / 2)[which, token]
            child = prefix[which] * model.vocab_size + 1 + token
            uniforms = torch.cat([uniforms[which], middle[:, None]], dim=1)
            below = torch.cat([below[which], child[:, None]], dim=1)
            weights = weights[which] * law[which, token]
            above = above[which]
        above = below
    return uniforms, weights


def in_eighths(vocab_size: int, depth: int, seed: int) -> Language:
    """A random language whose probabilities are multiples of 1 / 8."""
    generator = torch.Generator().manual_seed(seed)
    num_prefixes = sum(vocab_size**d for d in range(depth + 1))
    tokens = torch.randint(vocab_size, (num_prefixes, PARTS), generator=generator)
    table = torch.zeros((num_prefixes, vocab_size), dtype=torch.float64)
    return Language(table.scatter_add(1, tokens, torch.ones_like(tokens).double()) / 8)


def grid(num_uniforms: int) -> Tensor:
    """Every combination of the middles of eight equal parts of [0, 1)."""
    middles = (torch.arange(PARTS, dtype=torch.float64) + 0.5) / PARTS
    return torch.cartesian_prod(*[middles] * num_uniforms)
