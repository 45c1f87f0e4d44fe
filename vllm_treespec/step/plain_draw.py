"""Tokens of requests that have no tree in a step, drawn as trees' tokens are."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from vllm_treespec.scorers import TargetLogits, score
from vllm_treespec.scorers.coupled_draw import COUPLED_DRAW, draw_after
from vllm_treespec.trees.sizes import TreeSizes
from vllm_treespec.trees.tree import NO_NODE, TreeBatch

ROOT_ALONE = TreeSizes(max_nodes=1, max_depth=0, max_width=1, max_leaves=1)


class PlainDraw(NamedTuple):
    """The next tokens of requests that have no tree in a step."""

    # int64 [n], places in the batch, on the host
    host_reqs: np.ndarray
    # int64 [n], the same on the device
    reqs: Tensor
    # int64 [n]
    token_ids: Tensor


def draw_plainly(target: TargetLogits, keys: Tensor, batched: bool) -> Tensor:
    """Draw the next token of each request by the noise of its position.

    Args:
        target: the target's logits at the roots.
        keys: int64 [num_reqs, 1], see ``uniforms.noise_keys``.
        batched: whether the host must not wait for the device.

    Returns:
        int64 [num_reqs]; the likeliest token of greedy requests.

    """
    if target.sampling.all_random and not batched:
        reqs = torch.arange(len(keys))
        return draw_after(target, reqs, torch.zeros_like(reqs), keys[:, 0])
    zeros = torch.zeros_like(keys)
    roots = TreeBatch(
        token_ids=zeros,
        parents=torch.full_like(keys, NO_NODE),
        depths=zeros,
        num_nodes=torch.ones_like(keys[:, 0]),
    )
    sizes = ROOT_ALONE if batched else None
    return score(roots, target, keys, COUPLED_DRAW, sizes).next_token_ids
