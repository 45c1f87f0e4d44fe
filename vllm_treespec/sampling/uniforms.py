"""Pseudo-random numbers of a request at a position: the only randomness of a step.

Every number is a hash (SplitMix64, doi 10.1145/2714064.2660195) of the request's key,
a position of its text, a purpose and a place. It does not depend on the batch, the
schedule or the steps before. A number that is not used stays that of its position.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from vllm_treespec.host_copies import on_device

Numbers = np.ndarray | Tensor
# What numbers of a position are for: drawing drafts, accepting drawn drafts, and
# drawing the token at the position itself.
PURPOSES = DRAFTING, SCORING, EMITTING = range(3)
# The step of SplitMix64, and its two factors, as signed numbers.
STEP = 0x9E3779B97F4A7C15 - 2**64
FACTORS = (0xBF58476D1CE4E5B9 - 2**64, 0x94D049BB133111EB - 2**64)
SHIFTS = (30, 27, 31)
# Bits of a uniform number: half a unit more is still exact in float64.
BITS = 52


def mixed(numbers: Tensor) -> Tensor:
    """Mix the bits of numbers, int64, as SplitMix64 does after a step."""
    numbers = numbers + STEP
    for shift, factor in zip(SHIFTS, (*FACTORS, 1), strict=True):
        above = (numbers >> shift) & ((1 << (64 - shift)) - 1)
        numbers = (numbers ^ above) * factor
    return numbers


def seeded_key(seed: int) -> int:
    """Key of a request with a seed; seeds that differ by 2**64 share one."""
    signed = int(np.array(seed % 2**64, np.uint64).view(np.int64))
    return int(mixed(torch.tensor(signed)))


def numbered_key(engine_seed: int, number: int) -> int:
    """Key of the engine's request of this number, which has no seed."""
    of_engine = mixed(torch.tensor(seeded_key(engine_seed)))
    return int(mixed(of_engine + torch.tensor(number) * STEP))


def position_keys(request_keys: Tensor, positions: Tensor, purpose: int) -> Tensor:
    """Keys of the numbers for one purpose at positions.

    Args:
        request_keys: int64; shapes are broadcast.
        positions: int64, of tokens in their requests' texts.
        purpose: one of ``PURPOSES``.

    Returns:
        int64.

    """
    return mixed(request_keys + (positions * len(PURPOSES) + purpose) * STEP)


def hashed_uniforms(keys: Tensor, places: Tensor) -> Tensor:
    """Uniform numbers that belong to a position's key and a place.

    Args:
        keys: int64, see ``position_keys``; shapes are broadcast.
        places: int64, tokens for instance.

    Returns:
        float64 in (0, 1).

    """
    bits = (mixed(keys + places * STEP) >> (64 - BITS)) & ((1 << BITS) - 1)
    return (bits.double() + 0.5) * 2.0**-BITS


def keyed_uniforms(
    request_keys: Numbers, positions: Numbers, purpose: int, count: int
) -> Tensor:
    """Uniform numbers for drawing or accepting the tree below each root.

    Args:
        request_keys: int64 [num_reqs], anywhere.
        positions: int64 [num_reqs], of the roots, on the host or the device.
        purpose: ``DRAFTING`` or ``SCORING``.
        count: numbers a request.

    Returns:
        float64 [num_reqs, count] in (0, 1), where the positions are.

    """
    keys, there = _with_positions(request_keys, positions)
    places = torch.arange(count, device=there.device)
    if not count:
        return places.double().expand(len(keys), 0)
    return hashed_uniforms(position_keys(keys, there, purpose)[:, None], places)


def noise_keys(request_keys: Numbers, root_positions: Numbers, count: int) -> Tensor:
    """Keys of the noise by which the tokens behind each root are drawn.

    Args:
        request_keys: int64 [num_reqs], anywhere.
        root_positions: int64 [num_reqs], on the host or the device.
        count: positions behind each root.

    Returns:
        int64 [num_reqs, count], where the positions are: column d is for the token
        after a node of depth d.

    """
    keys, roots = _with_positions(request_keys, root_positions)
    after_roots = roots[:, None] + 1 + torch.arange(count, device=roots.device)
    return position_keys(keys[:, None], after_roots, EMITTING)


def _with_positions(request_keys: Numbers, positions: Numbers) -> tuple[Tensor, Tensor]:
    """Keys, and positions, where the positions are."""
    if not isinstance(positions, Tensor):
        positions = torch.from_numpy(positions)
    return on_device(request_keys, positions.device), positions
