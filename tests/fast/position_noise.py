"""Coupled draw with noise that can be enumerated, and keys of noise for tests.

``by_position`` is the rule itself; only, the noise of a position is one uniform number,
by which a token is drawn through inversion. So a grid of such numbers gives its law.
"""

from __future__ import annotations

from unittest.mock import patch

import torch
from torch import Tensor

from tests.fast.batched_rules import sizes_of
from vllm_treespec.sampling.draws import draw
from vllm_treespec.scorers import Rule, ScorerOutput, TargetLogits
from vllm_treespec.scorers.coupled_draw import COUPLED_DRAW
from vllm_treespec.trees.tree import TreeBatch

NOISE = "vllm_treespec.scorers.coupled_draw.draw_coupled"


def by_uniform(probs: Tensor, uniforms: Tensor, host_may_wait: bool = False) -> Tensor:
    """Draw by one uniform number a row, in the place of ``draw_coupled``."""
    return draw(probs, uniforms)


def by_position(
    tree: TreeBatch, target: TargetLogits, uniforms: Tensor
) -> ScorerOutput:
    """The walk of coupled draw, with a uniform number a depth, float64."""
    with patch(NOISE, by_uniform):
        return COUPLED_DRAW.walk(tree, target, uniforms)


def by_position_batched(
    tree: TreeBatch, target: TargetLogits, uniforms: Tensor
) -> ScorerOutput:
    """The same in the batched form."""
    with patch(NOISE, by_uniform):
        return COUPLED_DRAW.apply(tree, target, uniforms, sizes_of(tree))


def random_keys(*shape: int, seed: int = 0) -> Tensor:
    """Keys of independent noise, int64."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-(2**63), 2**63 - 1, shape, generator=generator)


def numbers_of(rule: Rule, uniforms: Tensor) -> Tensor:
    """Random numbers of a rule from uniform ones: keys, if it follows noise."""
    return (uniforms * 2.0**62).long() if rule.follows_noise else uniforms
