"""Every tree that stochastic beam search draws under fixed Gumbel uniforms."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.fast.enumeration import Weighted, propose, token_uniforms
from tests.fast.languages import Language, plain_sampling
from vllm_treespec.proposers import RsdS, StochasticTree


def rand(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(shape, generator=generator, dtype=torch.float64)


def all_rsd_s_trees(
    draft: Language, beam_width: int, seed: int, vocabulary: Tensor | None = None
) -> Weighted:
    """Every token draw of two levels, under one choice of the Gumbel uniforms."""
    return all_beam_trees(RsdS(beam_width, 2), draft, beam_width, seed, vocabulary)


def all_beam_trees(
    proposer: RsdS | StochasticTree,
    draft: Language,
    width: int,
    seed: int,
    vocabulary: Tensor | None = None,
) -> Weighted:
    """The same for any proposer that draws ``width`` children of ``width`` nodes."""
    tokens, weights = token_uniforms(draft, (width, width))
    noise = rand(1, proposer.sizes.num_uniforms // 2, seed=seed).expand(len(tokens), -1)
    uniforms = torch.cat([tokens, noise], dim=1)
    sampling = plain_sampling(len(tokens))
    tree = propose(proposer, draft, sampling, uniforms, vocabulary)
    return Weighted(tree, weights)
