"""Gumbel noise that draft and target share, so that both choose alike (torch only).

The highest of log p + noise is a draw from p (the Gumbel-max trick). Two distributions
that look at the same noise draw the same token more often than not: they are coupled
(arXiv 2408.07978; lists of drafts: arXiv 2506.05632).

The noise of a token is a hash of a key and the token, so that only likely tokens cost
anything, and all ranks have the same.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vllm_treespec.core.sampling import draw, most_likely

# Tokens whose noise is looked at one by one. All others together have one noise.
LIKELIEST = 64
# Take the place of a token, for what is drawn of all others together.
OTHERS, OTHERS_PLACE = -1, -2
# The step of SplitMix64, and its two factors, as signed numbers.
STEP = 0x9E3779B97F4A7C15 - 2**64
FACTORS = (0xBF58476D1CE4E5B9 - 2**64, 0x94D049BB133111EB - 2**64)
SHIFTS = (30, 27, 31)
# Bits of keys and uniform numbers: half a unit more is still exact in float64.
BITS = 52
# More than a sum of float32 probabilities is off.
ROUNDING = 1e-5


def mixed(numbers: Tensor) -> Tensor:
    """Mix the bits of numbers, int64, as SplitMix64 does."""
    for shift, factor in zip(SHIFTS, (*FACTORS, 1), strict=True):
        above = (numbers >> shift) & ((1 << (64 - shift)) - 1)
        numbers = (numbers ^ above) * factor
    return numbers


def hashed_uniforms(keys: Tensor, token_ids: Tensor) -> Tensor:
    """Uniform numbers that belong to a key and a token.

    Args:
        keys: float64 in [0, 1).
        token_ids: int64; both shapes are broadcast.

    Returns:
        float64 in (0, 1).

    """
    stream = mixed((keys * 2.0**BITS).long() + STEP)
    bits = (mixed(stream + token_ids * STEP) >> (64 - BITS)) & ((1 << BITS) - 1)
    return (bits.double() + 0.5) * 2.0**-BITS


def noise_of(keys: Tensor, token_ids: Tensor) -> Tensor:
    """Standard Gumbel noise of tokens, float64; see ``hashed_uniforms``."""
    return -(-hashed_uniforms(keys, token_ids).log()).log()


def draw_coupled(probs: Tensor, keys: Tensor, host_may_wait: bool = False) -> Tensor:
    """Draw one token per row: that of the highest log probability plus noise.

    Exact for any vocabulary: the highest of the tokens that are not looked at one by
    one has the law of one Gumbel around the log of their mass, and is then drawn.

    Args:
        probs: float32 [rows, vocab_size]; need not be normalised.
        keys: float64 [rows] in [0, 1), of independent noise.
        host_may_wait: for the device, to leave out what is hardly ever needed.

    Returns:
        int64 [rows]; token 0 where no token has positive probability.

    """
    mass, tokens = most_likely(probs, min(LIKELIEST, probs.shape[1]))
    values, best = (mass.double().log() + noise_of(keys[:, None], tokens)).max(dim=1)
    chosen = tokens.gather(1, best[:, None])[:, 0].masked_fill(values.isneginf(), 0)
    noise = noise_of(keys, torch.full_like(best, OTHERS))
    if host_may_wait:
        at_most = probs.sum(dim=1, dtype=torch.float64) - mass.sum(dim=1)
        may_be_other = (at_most.clamp(min=0) + ROUNDING).log() + noise > values
        if not may_be_other.any():
            return chosen
    others = probs.scatter(1, tokens, 0.0)
    left = others.sum(dim=1, dtype=torch.float64)
    places = hashed_uniforms(keys, torch.full_like(best, OTHERS_PLACE))
    is_other = left.log() + noise > values
    return torch.where(is_other, draw(others, places), chosen)


def coupled_chances(keys: Tensor, tokens: Tensor, mass: Tensor) -> Tensor:
    """How likely each token is the one that the target draws, given the noise.

    A softmax of log probabilities plus noise: without noise it would be the
    probabilities themselves.

    Args:
        keys: float64 [num_reqs] in [0, 1).
        tokens: int64 [num_reqs, width, count], likely ones, of the target's vocabulary.
        mass: float32, same shape, their probabilities in the draft.

    Returns:
        float64, same shape. All other tokens count with their mass.

    """
    values = mass.double().log() + noise_of(keys[:, None, None], tokens)
    others = (1 - mass.double().sum(-1, keepdim=True)).clamp(min=0).log()
    return torch.cat([values, others], dim=-1).softmax(dim=-1)[..., :-1]
