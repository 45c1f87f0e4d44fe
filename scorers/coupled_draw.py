"""Coupled draw: follow tokens that the target draws by noise known to the drafts."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from vllm_treespec.core.coupling import draw_coupled
from vllm_treespec.core.sizes import TreeSizes
from vllm_treespec.core.tree import TreeBatch
from vllm_treespec.scorers.base import Rule, ScorerOutput, TargetLogits
from vllm_treespec.scorers.batched import groups, node_numbers
from vllm_treespec.scorers.follow_path import follow_path, follow_path_batched


def coupled_draw(
    tree: TreeBatch, target: TargetLogits, uniforms: Tensor
) -> ScorerOutput:
    """Accept the longest path that sampling by this noise would have produced.

    Lossless for every tree, also for one that was drafted by looking at the noise
    (arXiv 2408.07978 for chains, 2506.05632 for lists of drafts): each emitted token is
    a function of the target and of noise that no earlier token was drawn by. The tree
    only decides how many of these tokens one step emits.

    Args:
        tree: drafts; ``draws`` is not used.
        target: the target's logits at the nodes.
        uniforms: float64 [num_reqs, at least 1 + max_depth] in [0, 1): column d is the
            key of the noise by which the token after a node of depth d is drawn.

    """

    def next_token(reqs: Sequence[int], nodes: Sequence[int]) -> list[int]:
        req, node = torch.tensor([reqs, nodes], device=uniforms.device)
        keys = uniforms[req, tree.depths[req, node]]
        drawn = draw_coupled(target.probs(req, node), keys, host_may_wait=True)
        tokens: list[int] = drawn.tolist()
        return tokens

    return follow_path(tree, next_token)


def coupled_draw_batched(
    tree: TreeBatch, target: TargetLogits, uniforms: Tensor, sizes: TreeSizes
) -> ScorerOutput:
    """Do what ``coupled_draw`` does, for all nodes together.

    Args:
        tree: drafts; ``draws`` is not used.
        target: the target's logits at the nodes.
        uniforms: float64 [num_reqs, at least 1 + max_depth] in [0, 1): column d is the
            key of the noise by which the token after a node of depth d is drawn.
        sizes: the trees' bounds; only the depth is used.

    """
    nodes = node_numbers(tree)
    reqs = torch.arange(tree.num_reqs, device=nodes.device)[:, None].expand_as(nodes)
    drawn = [
        draw_coupled(target.probs(req, node), uniforms[req, tree.depths[req, node]])
        for req, node in zip(
            groups(reqs.flatten()), groups(nodes.flatten()), strict=True
        )
    ]
    return follow_path_batched(tree, torch.cat(drawn).view_as(nodes), sizes)


COUPLED_DRAW = Rule("coupled_draw", coupled_draw, coupled_draw_batched)
