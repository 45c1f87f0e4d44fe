"""The noise by which vLLM's V2 runner draws the token of a position.

vLLM adds Gumbel noise to logits: a MurmurHash3 of the request's seed, the position and
the token (``vllm/v1/worker/gpu/sample/gumbel.py``). Drafts that are ranked by the same
noise are the likelier ones. A kernel mixes the tokens in (``kernels/gumbel.py``).
"""

from __future__ import annotations

import numpy as np


def gumbel_keys(
    seeds: np.ndarray, root_positions: np.ndarray, count: int
) -> np.ndarray:
    """Keys of the noise by which the tokens behind each root are drawn.

    Args:
        seeds: int64 [num_reqs], vLLM's own of each request.
        root_positions: int64 [num_reqs].
        count: positions behind each root.

    Returns:
        int64 [num_reqs, count]: column d is for the token after a node of depth d.

    """
    positions = root_positions[:, None] + np.arange(count)
    state = np.zeros(positions.shape, dtype=np.uint32)
    for part in (seeds[:, None], seeds[:, None] >> 32, positions):
        state = _mixed(state, part.astype(np.uint32))
    return state.astype(np.int64)


def _mixed(state: np.ndarray, part: np.ndarray) -> np.ndarray:
    """Mix 32 more bits into a state of MurmurHash3, uint32 both."""
    part = _rotated(part * np.uint32(0xCC9E2D51), 15) * np.uint32(0x1B873593)
    return _rotated(state ^ part, 13) * np.uint32(5) + np.uint32(0xE6546B64)


def _rotated(bits: np.ndarray, shift: int) -> np.ndarray:
    """Rotate 32 bits to the left."""
    return (bits << np.uint32(shift)) | (bits >> np.uint32(32 - shift))
