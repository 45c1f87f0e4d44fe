"""Exact draws from distributions.

Every draw takes its uniform numbers as an argument, so that a request's draws do
not depend on the batch it runs in.

Cumulative sums are float64. On a GPU those of a single row differ from run to run, see
laws.py: by simulation 5 draws in 1e12 then differ, in float32 3 in 1000.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vllm_treespec.host_copies import is_on_cpu

# When less than this share of the mass is left after some draws, the rest is summed
# again: the difference of cumulative sums would be mostly rounding error.
THIN = 1e-6


def draw(probs: Tensor, uniforms: Tensor) -> Tensor:
    """Draw one token per row by inverting the cumulative distribution.

    Args:
        probs: float32 [rows, vocab_size]; need not be normalised.
        uniforms: [rows] in [0, 1).

    Returns:
        int64 [rows]; token 0 where no token has positive probability.

    """
    return _invert(probs, uniforms[:, None])[:, 0]


def draw_without_replacement(probs: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """Draw tokens one after another, each from what the earlier ones left over.

    Same law and same order as Gumbel-top-k on ``log probs`` (arXiv 2402.14160, eq. 7)
    for one uniform number a token instead of one Gumbel a vocabulary entry.

    Args:
        probs: float32 [rows, vocab_size]; need not be normalised.
        uniforms: [rows, count] in [0, 1).

    Returns:
        tokens int64 [rows, count], all in the vocabulary, and valid bool
        [rows, count]; a draw is invalid when no token with positive probability is
        left.

    """
    count = uniforms.shape[1]
    cumulative = probs.cumsum(dim=-1, dtype=torch.float64)
    total = cumulative[:, -1:]
    below_total = torch.nextafter(total, torch.zeros_like(total))
    support = (probs > 0).sum(dim=-1)
    tokens = probs.new_zeros((probs.shape[0], count), dtype=torch.int64)
    valid = torch.zeros_like(tokens, dtype=torch.bool)
    # Intervals of the drawn tokens on the cumulative distribution, ascending.
    starts = masses = cumulative.new_empty((probs.shape[0], 0))
    for k in range(count):
        left = total - masses.sum(dim=1, keepdim=True)
        uniform = uniforms[:, k : k + 1].double()
        point = uniform * left
        # Skip the intervals that lie before the point, as if they were cut out.
        passed = point >= starts - (masses.cumsum(1) - masses)
        point = point + (masses * passed).sum(dim=1, keepdim=True)
        point = torch.minimum(point.clamp(min=0), below_total)
        token = _token_at(cumulative, point)
        valid[:, k] = k < support
        if k:
            repeated = (tokens[:, :k] == token).any(dim=1)
            thin = left[:, 0] < THIN * total[:, 0]
            again = valid[:, k] & (thin | repeated)
            # Rare. On a GPU, reading the flag takes longer than an unnecessary draw.
            if not is_on_cpu(probs) or bool(again.any()):
                rest = probs.scatter(1, tokens[:, :k], 0.0)
                token = torch.where(again[:, None], _invert(rest, uniform), token)
        tokens[:, k] = token[:, 0]
        if k + 1 < count:
            start = cumulative.gather(1, (token - 1).clamp(min=0))
            start = torch.where(token > 0, start, 0.0)
            mass = cumulative.gather(1, token) - start
            starts, order = torch.cat([starts, start], 1).sort(dim=1)
            masses = torch.cat([masses, mass], 1).gather(1, order)
    return tokens, valid


def _invert(probs: Tensor, uniforms: Tensor) -> Tensor:
    """Draw one token per row for ``uniforms`` [rows, 1], int64 [rows, 1]."""
    cumulative = probs.cumsum(dim=-1, dtype=torch.float64)
    total = cumulative[:, -1:]
    below_total = torch.nextafter(total, torch.zeros_like(total))
    point = torch.minimum(uniforms.double() * total, below_total)
    return _token_at(cumulative, point)


def _token_at(cumulative: Tensor, point: Tensor) -> Tensor:
    """The token at whose step the distribution passes a point, int64 [rows, 1]."""
    token = torch.searchsorted(cumulative, point, right=True)
    return token.masked_fill_(~(cumulative[:, -1:] > 0), 0)


def truncated_gumbel(location: Tensor, bound: Tensor, uniforms: Tensor) -> Tensor:
    """Draw Gumbel variables conditioned on being at most ``bound``.

    Stable for any distance between location and bound: the inverse of the truncated
    distribution function, written with log-sum-exp (arXiv 1903.06059, appendix B.3).

    Args:
        location: log mass, -inf allowed (gives -inf).
        bound: upper bound, same shape.
        uniforms: in [0, 1), same shape.

    """
    noise = torch.log(-torch.log(uniforms.clamp(min=torch.finfo(uniforms.dtype).tiny)))
    gumbel = location - torch.logaddexp(location - bound, noise)
    return gumbel.masked_fill(location == -torch.inf, -torch.inf)
