"""The noise by which vLLM's V2 sampler draws, for drafts that are ranked by it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from vllm_treespec.host_copies import on_device
from vllm_treespec.kernels.gumbel import gumbel_noise
from vllm_treespec.sampling.gumbel import gumbel_keys

if TYPE_CHECKING:
    from vllm_treespec.engine.v2.runner import TreeRunnerMixin
    from vllm_treespec.sources.base import Roots


class SamplerNoise:
    """Noise by the seeds of vLLM's sampler; a request without one has a random seed."""

    def __init__(self, runner: TreeRunnerMixin) -> None:
        """Take the runner, which knows the seeds."""
        self.runner = runner

    def keys(self, roots: Roots, count: int) -> Tensor:
        """Keys of the noise of the tokens behind each root, int64 [num_reqs, count]."""
        runner = self.runner
        names = map(runner.decoder.slots.name, roots.slots.tolist())
        rows = [runner.req_states.req_id_to_index[name] for name in names]
        seeds = runner.sampler.sampling_states.seeds.np[rows]
        positions = torch.from_numpy(roots.positions)
        return on_device(gumbel_keys(seeds, positions, count), runner.device)

    def of(self, keys: Tensor, token_ids: Tensor) -> Tensor:
        """Noise of tokens, float64."""
        return gumbel_noise(keys, token_ids)
