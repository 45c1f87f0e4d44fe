"""The noise by which vLLM's V2 runner draws the token of a position.

vLLM adds Gumbel noise to logits: a MurmurHash3 of the request's seed, the position and
the token (``vllm/v1/worker/gpu/sample/gumbel.py``). Drafts that are ranked by the same
noise are the likelier ones. A kernel mixes the tokens in (``kernels/gumbel.py``).
"""

from __future__ import annotations

import torch
from torch import Tensor

MASK = 0xFFFFFFFF


def gumbel_keys(seeds: Tensor, root_positions: Tensor, count: int) -> Tensor:
    """Keys of the noise by which the tokens behind each root are drawn.

    Args:
        seeds: int64 [num_reqs], vLLM's own of each request.
        root_positions: int64 [num_reqs].
        count: positions behind each root.

    Returns:
        int64 [num_reqs, count]: column d is for the token after a node of depth d.

    """
    depths = torch.arange(count, device=seeds.device)
    positions = root_positions[:, None] + depths
    state = torch.zeros_like(positions)
    for part in (seeds[:, None] & MASK, (seeds[:, None] >> 32) & MASK, positions):
        state = _mixed(state, part & MASK)
    return state


def _mixed(state: Tensor, part: Tensor) -> Tensor:
    """Mix 32 more bits into a state of MurmurHash3, int64 both."""
    part = (part * 0xCC9E2D51) & MASK
    part = (_rotated(part, 15) * 0x1B873593) & MASK
    return (_rotated(state ^ part, 13) * 5 + 0xE6546B64) & MASK


def _rotated(bits: Tensor, shift: int) -> Tensor:
    """Rotate 32 bits to the left."""
    return ((bits << shift) | (bits >> (32 - shift))) & MASK
