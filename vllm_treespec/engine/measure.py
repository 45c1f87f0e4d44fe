"""What trees take of a GPU's memory, made or computed while vLLM measures it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch

from vllm_treespec.step.profile import profile_trees

if TYPE_CHECKING:
    from vllm.config import ModelConfig, ParallelConfig

    from vllm_treespec.engine.drafter import TreeDrafter
    from vllm_treespec.layouts.node_masks import NodeMasks
    from vllm_treespec.step.decoder import TreeDecoder


class MaskedRunner(Protocol):
    """A runner whose trees lie under masks."""

    masks: NodeMasks
    drafter: TreeDrafter
    decoder: TreeDecoder
    model_config: ModelConfig
    parallel_config: ParallelConfig
    max_num_reqs: int
    device: torch.device


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
