"""Target draw: follow tokens drawn from the target down the tree."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from vllm_treespec.core.sampling import draw
from vllm_treespec.core.sizes import TreeSizes
from vllm_treespec.core.tree import TreeBatch
from vllm_treespec.scorers.base import Rule, ScorerOutput, TargetLogits
from vllm_treespec.scorers.batched import groups, node_numbers
from vllm_treespec.scorers.follow_path import follow_path, follow_path_batched


def target_draw(
    tree: TreeBatch, target: TargetLogits, uniforms: Tensor
) -> ScorerOutput:
    """Accept the longest path that plain sampling would have produced.

    Lossless for every tree, whatever it was made from (prompt, beam search, draws, cut
    by value), as long as ``uniforms`` are independent of it: each emitted token is
    drawn from the target before the tree is looked at. At each node it accepts the
    mass that the target gives to the children: no rule accepts more of fixed drafts.

    Args:
        tree: drafts; ``draws`` is not used.
        target: the target's logits at the nodes.
        uniforms: float64 [num_reqs, at least max_nodes] in [0, 1): column i draws the
            token after node i, so that no number is used twice.

    """

    def next_token(reqs: Sequence[int], nodes: Sequence[int]) -> list[int]:
        places = torch.tensor([reqs, nodes], device=uniforms.device)
        drawn = draw(target.probs(*places), uniforms[tuple(places)])
        tokens: list[int] = drawn.tolist()
        return tokens

    return follow_path(tree, next_token)


def target_draw_batched(
    tree: TreeBatch, target: TargetLogits, uniforms: Tensor, sizes: TreeSizes
) -> ScorerOutput:
    """Do what ``target_draw`` does, for all nodes together.

    Args:
        tree: drafts; ``draws`` is not used.
        target: the target's logits at the nodes.
        uniforms: float64 [num_reqs, at least max_nodes] in [0, 1): column i draws the
            token after node i.
        sizes: the trees' bounds; only the depth is used.

    """
    nodes = node_numbers(tree)
    reqs = torch.arange(tree.num_reqs, device=nodes.device)[:, None].expand_as(nodes)
    drawn = [
        draw(target.probs(req, node), uniforms[req, node])
        for req, node in zip(
            groups(reqs.flatten()), groups(nodes.flatten()), strict=True
        )
    ]
    return follow_path_batched(tree, torch.cat(drawn).view_as(nodes), sizes)


TARGET_DRAW = Rule("target_draw", target_draw, target_draw_batched)
