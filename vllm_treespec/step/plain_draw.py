"""Tokens of requests that have no tree in a step, drawn as trees' tokens are."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from vllm_treespec.batch.matching import PlacedTrees
from vllm_treespec.batch.views import SamplingView, ScheduledBatch
from vllm_treespec.host_copies import on_device
from vllm_treespec.sampling.uniforms import noise_keys
from vllm_treespec.scorers import TargetLogits, score
from vllm_treespec.scorers.coupled_draw import COUPLED_DRAW, draw_after
from vllm_treespec.step.target import StepTarget
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


def draw_without_trees(
    target: StepTarget,
    logits: Tensor,
    sampling: SamplingView,
    batch: ScheduledBatch,
    trees: PlacedTrees | None,
    batched: bool,
) -> PlainDraw | None:
    """Draw the tokens of requests without a tree; None if none is drawn.

    The engine's sampler must draw for requests whose parameters trees cannot follow. It
    also serves where all requests are greedy without penalties.

    Args:
        target: of the step.
        logits: [num_rows, vocab_size].
        sampling: of the requests of the batch.
        batch: the step.
        trees: of the step.
        batched: whether the host must not wait for the device.

    """
    if trees is None and sampling.likeliest_only:
        return None
    drawn_for = target.slots.supported(batch.slots)
    if trees is not None:
        drawn_for[trees.host_reqs] = False
    host_reqs = np.flatnonzero(drawn_for)
    if not len(host_reqs):
        return None
    reqs = on_device(host_reqs, logits.device)
    keys = target.slots.keys(batch.slots[host_reqs])
    noise = noise_keys(keys, batch.root_positions[host_reqs], 1)
    noise = on_device(noise, logits.device)
    with target.at(logits, sampling, batch, host_reqs, reqs) as roots:
        return PlainDraw(host_reqs, reqs, draw_plainly(roots, noise, batched))
