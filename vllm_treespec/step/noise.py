"""The noise by which a position's token is drawn, for drafts that are ranked by it."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from vllm_treespec.batch.requests import RequestSlots
from vllm_treespec.host_copies import on_device
from vllm_treespec.sampling.coupling import noise_of
from vllm_treespec.sampling.uniforms import noise_keys
from vllm_treespec.sources.base import Roots


class PositionNoise(Protocol):
    """The noise of whatever draws the target's tokens."""

    def keys(self, roots: Roots, count: int) -> Tensor:
        """Keys of the noise of the tokens behind each root, int64 [num_reqs, count]."""

    def of(self, keys: Tensor, token_ids: Tensor) -> Tensor:
        """Noise of tokens, float64; see ``coupling.noise_of``."""


class HashedNoise:
    """Our own noise, by the requests' keys."""

    def __init__(self, slots: RequestSlots, device: torch.device) -> None:
        """Take the requests' keys, and where drafts are drawn."""
        self.slots = slots
        self.device = device

    def keys(self, roots: Roots, count: int) -> Tensor:
        """Keys of the noise of the tokens behind each root, int64 [num_reqs, count]."""
        keys = self.slots.keys(roots.slots)
        return on_device(noise_keys(keys, roots.positions, count), self.device)

    def of(self, keys: Tensor, token_ids: Tensor) -> Tensor:
        """Noise of tokens, float64; see ``coupling.noise_of``."""
        return noise_of(keys, token_ids)
