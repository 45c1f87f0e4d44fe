"""What runners whose trees lie under masks share: masks, buffers, memory."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import TYPE_CHECKING, Protocol

import torch

from vllm_treespec.layouts.base import LayoutLimits
from vllm_treespec.layouts.masks import MaskLayout
from vllm_treespec.layouts.node_masks import NodeMasks
from vllm_treespec.step.profile import profile_trees
from vllm_treespec.trees.tree import MAX_NODES

if TYPE_CHECKING:
    from vllm.config import ModelConfig, ParallelConfig
    from vllm.v1.worker.utils import AttentionGroup

    from vllm_treespec.engine.drafter import TreeDrafter
    from vllm_treespec.step.decoder import TreeDecoder


class MaskedRunner(Protocol):
    """A runner whose trees lie under masks."""

    masks: NodeMasks
    drafter: TreeDrafter
    decoder: TreeDecoder
    model_config: ModelConfig
    parallel_config: ParallelConfig
    max_num_tokens: int
    max_num_reqs: int
    device: torch.device
    attn_groups: Sequence[Sequence[AttentionGroup]]


def make_masks(runner: MaskedRunner, limits: LayoutLimits) -> MaskLayout:
    """Make the masks, which CUDA graphs keep, and their layout."""
    runner.masks = NodeMasks(
        max(runner.max_num_tokens, limits.max_trees * MAX_NODES),
        max(runner.max_num_reqs, limits.max_trees),
        runner.device,
    )
    return MaskLayout(limits, runner.masks)


def show_masks(runner: MaskedRunner) -> None:
    """Let every metadata builder see the masks."""
    for group in chain.from_iterable(runner.attn_groups):
        for builder in group.metadata_builders:
            builder.masks = runner.masks


def make_workspaces(runner: MaskedRunner) -> None:
    """Make the attention kernel's buffers, which last."""
    config = runner.model_config
    num_heads = config.get_num_attention_heads(runner.parallel_config)
    runner.masks.workspace(num_heads, config.get_head_size())
    for source in runner.drafter.paged:
        runner.masks.workspace(*source.attention_shape)


def measure_trees(runner: MaskedRunner) -> None:
    """Draw and score as many trees as a step may have."""
    config = runner.model_config
    hidden = torch.zeros(
        (
            min(runner.decoder.method.max_trees, runner.max_num_reqs),
            config.get_hidden_size(),
        ),
        dtype=config.dtype,
        device=runner.device,
    )
    profile_trees(runner.decoder, config.get_vocab_size(), hidden)
