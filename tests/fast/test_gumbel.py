"""The noise by which vLLM's V2 sampler draws, against MurmurHash3 in whole numbers."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from tests.fast.interpreted import interpreted
from vllm_treespec.kernels import gumbel
from vllm_treespec.kernels.gumbel import gumbel_noise, warm_up
from vllm_treespec.sampling.gumbel import gumbel_keys

BITS = 2**32


@pytest.fixture(autouse=True, scope="module")
def in_interpreter() -> Iterator[None]:
    """Run the kernel without a card."""
    with interpreted(gumbel):
        yield


def rotated(bits: int, shift: int) -> int:
    """Rotate 32 bits to the left."""
    return (bits << shift | bits >> (32 - shift)) % BITS


def murmur(parts: list[int]) -> int:
    """MurmurHash3 of 32-bit parts (Appleby, smhasher, MurmurHash3_x86_32)."""
    state = 0
    for part in parts:
        mixed = rotated(part * 0xCC9E2D51 % BITS, 15) * 0x1B873593 % BITS
        state = (rotated(state ^ mixed, 13) * 5 + 0xE6546B64) % BITS
    state ^= 4 * len(parts)
    state = (state ^ state >> 16) * 0x85EBCA6B % BITS
    state = (state ^ state >> 13) * 0xC2B2AE35 % BITS
    return state ^ state >> 16


def test_noise_is_murmurhash() -> None:
    """Red when a hash loses a bit, or a token gets the noise of another request."""
    seeds, positions = [0, 7, -5, 2**62 + 99], [0, 3, 2**31 + 1, 12]
    tokens = torch.tensor([[0, 5, 128_255], [1, 2, 3], [9, 8, 7], [4, 4, 2**31]])
    keys = gumbel_keys(np.array(seeds), torch.tensor(positions), 2)
    noise = gumbel_noise(keys[..., None], tokens[:, None])
    assert noise.shape == (4, 2, 3)
    for row, (seed, position) in enumerate(zip(seeds, positions, strict=True)):
        for depth in range(2):
            for column, token in enumerate(tokens[row].tolist()):
                halves = [seed % BITS, (seed >> 32) % BITS]
                bits = murmur([*halves, (position + depth) % BITS, token % BITS])
                expected = -math.log1p(-(bits + 0.5) / BITS)
                found = float(noise[row, depth, column])
                assert found == pytest.approx(expected, rel=1e-6, abs=1e-12)


def test_many_tokens() -> None:
    """Red when tokens behind the first block of the kernel have no noise."""
    tokens = torch.arange(1000)
    noise = gumbel_noise(torch.tensor([3]), tokens)
    assert (
        noise[500:].tolist() == gumbel_noise(torch.tensor([3]), tokens[500:]).tolist()
    )
    assert 0.8 < float(noise.mean()) < 1.2


def test_warm_up() -> None:
    """Red when the warm-up ends an engine's start."""
    warm_up(torch.device("cpu"))
