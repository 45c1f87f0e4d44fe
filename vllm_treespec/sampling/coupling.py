"""Exponential noise that draft and target share, so that both choose alike.

The token of the highest probability / noise is a draw (an exponential race, the
Gumbel-max trick without logarithms). Two distributions that look at the same noise draw
the same token more often than not: they are coupled (arXiv 2408.07978; lists of drafts:
arXiv 2506.05632).

The noise of a token belongs to a request, a position and the token (``uniforms.py``),
so that only likely tokens cost anything, and all ranks have the same. Torch only.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vllm_treespec.sampling.draws import draw
from vllm_treespec.sampling.laws import most_likely
from vllm_treespec.sampling.uniforms import hashed_uniforms

# Tokens that have noise of their own. All others together have one noise.
LIKELIEST = 64
# Take the place of a token, for what is drawn of all others together.
OTHERS, OTHERS_PLACE = -1, -2
# More than a sum of float32 probabilities is off.
ROUNDING = 1e-5


def noise_of(keys: Tensor, token_ids: Tensor) -> Tensor:
    """Standard exponential noise of tokens, float64.

    Args:
        keys: int64, see ``uniforms.noise_keys``; shapes are broadcast.
        token_ids: int64.

    """
    return -hashed_uniforms(keys, token_ids).log()


def draw_coupled(probs: Tensor, keys: Tensor, can_sync: bool = False) -> Tensor:
    """Draw one token per row: that of the highest probability / noise.

    Exact for any vocabulary: the first to arrive of the tokens without noise of their
    own does so after one exponential time of their common rate, and is then drawn.

    Args:
        probs: float32 [rows, vocab_size]; need not be normalised.
        keys: int64 [rows], of independent noise.
        can_sync: for the device, to leave out what is hardly ever needed.

    Returns:
        int64 [rows]; token 0 where no token has positive probability.

    """
    mass, tokens = most_likely(probs, min(LIKELIEST, probs.shape[1]))
    others = torch.full_like(tokens[:, :1], OTHERS)
    noise = noise_of(keys[:, None], torch.cat([tokens, others], dim=1))
    values, best = (mass / noise[:, :-1]).max(dim=1)
    chosen = tokens.gather(1, best[:, None])[:, 0].masked_fill(values == 0, 0)
    least = values * noise[:, -1]
    if not can_sync:
        return _or_another(chosen, probs, tokens, keys, least)
    at_most = (probs.sum(dim=1) - mass.sum(dim=1)).clamp(min=0) + ROUNDING
    rows = torch.nonzero(at_most > least)[:, 0]
    if len(rows):
        given = (chosen, probs, tokens, keys, least)
        chosen[rows] = _or_another(*(tensor[rows] for tensor in given))
    return chosen


def _or_another(
    chosen: Tensor, probs: Tensor, tokens: Tensor, keys: Tensor, least: Tensor
) -> Tensor:
    """Draw one of the other tokens where their mass exceeds a bound.

    Args:
        chosen: int64 [rows], what is drawn elsewhere.
        probs: float32 [rows, vocab_size].
        tokens: int64 [rows, count], those that are no other ones.
        keys: int64 [rows].
        least: float64 [rows], the bounds.

    """
    others = probs.scatter(1, tokens, 0.0)
    is_other = others.sum(dim=1, dtype=torch.float64) > least
    places = hashed_uniforms(keys, torch.full_like(chosen, OTHERS_PLACE))
    return torch.where(is_other, draw(others, places), chosen)


def coupled_chances(noise: Tensor, mass: Tensor) -> Tensor:
    """How likely each token is the one that the target draws, given the noise.

    Without noise it would be the probabilities themselves.

    Args:
        noise: float64 [num_reqs, width, count], of likely tokens.
        mass: float32, same shape, their probabilities in the draft.

    Returns:
        float64, same shape. All other tokens count with their mass.

    """
    rates = mass / noise
    others = (1 - mass.double().sum(-1, keepdim=True)).clamp(min=0)
    return rates / (rates.sum(-1, keepdim=True) + others)
