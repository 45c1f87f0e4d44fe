"""The noise by which vLLM's V2 runner draws the token of a position.

vLLM adds Gumbel noise to logits: a MurmurHash3 of the request's seed, the position and
the token (``vllm/v1/worker/gpu/sample/gumbel.py``). Drafts that are ranked by the same
noise are the likelier ones. Seeds are hashed here; a kernel mixes positions and tokens
in (``kernels/gumbel.py``).
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from vllm_treespec.host_copies import on_device


def gumbel_keys(seeds: np.ndarray, root_positions: Tensor, count: int) -> Tensor:
    """Keys of the noise by which the tokens behind each root are drawn.

    Args:
        seeds: int64 [num_reqs], vLLM's own of each request.
        root_positions: int64 [num_reqs], on the host or the device.
        count: positions behind each root.

    Returns:
        int64 [num_reqs, count], where the positions are: column d is for the token
        after a node of depth d. The lower 32 bits are the position.

    """
    state = np.zeros(len(seeds), dtype=np.uint32)
    for part in (seeds, seeds >> 32):
        state = _mixed(state, part.astype(np.uint32))
    device = root_positions.device
    hashed = on_device(state.astype(np.int64), device) << 32
    return (hashed + root_positions)[:, None] + torch.arange(count, device=device)


def _mixed(state: np.ndarray, part: np.ndarray) -> np.ndarray:
    """Mix 32 more bits into a state of MurmurHash3, uint32 both."""
    part = _rotated(part * np.uint32(0xCC9E2D51), 15) * np.uint32(0x1B873593)
    return _rotated(state ^ part, 13) * np.uint32(5) + np.uint32(0xE6546B64)


def _rotated(bits: np.ndarray, shift: int) -> np.ndarray:
    """Rotate 32 bits to the left."""
    return (bits << np.uint32(shift)) | (bits >> np.uint32(32 - shift))
