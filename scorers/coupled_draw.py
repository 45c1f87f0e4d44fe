"""Coupled draw: follow tokens that the target draws by the noise of their positions."""

from __future__ import annotations

import torch
from torch import Tensor

from vllm_treespec.sampling.coupling import draw_coupled
from vllm_treespec.scorers.base import Rule, ScorerOutput, TargetLogits
from vllm_treespec.scorers.follow_path import follow_draws, follow_draws_batched
from vllm_treespec.trees.sizes import TreeSizes
from vllm_treespec.trees.tree import TreeBatch

# Distributions that are drawn from at once. The system clears the memory of more each
# time anew: 16 of 49,152 or 151,936 tokens take a third longer.
ROWS_AT_ONCE = 4


def draw_after(
    target: TargetLogits, reqs: Tensor, nodes: Tensor, keys: Tensor
) -> Tensor:
    """Draw the token after each node, int64 [n]; the host waits for the device.

    Args:
        target: the target's logits at the nodes.
        reqs: int64 [n], all sampled.
        nodes: int64 [n].
        keys: int64 [n], of the noise of the tokens' positions.

    """
    rows = zip(
        *(given.split(ROWS_AT_ONCE) for given in (reqs, nodes, keys)), strict=True
    )
    drawn = [
        draw_coupled(target.probs(req, node), key, can_sync=True)
        for req, node, key in rows
    ]
    return torch.cat(drawn)


def coupled_draw(tree: TreeBatch, target: TargetLogits, keys: Tensor) -> ScorerOutput:
    """Accept the longest path that plain sampling by this noise would have produced.

    Lossless for every tree, whatever it was made from and also if it was drafted by
    looking at the noise (arXiv 2408.07978 for chains, 2506.05632 for lists of drafts):
    the token of a position is a function of the target's distribution there and of the
    position's noise. The tree only decides how many tokens one step emits.

    Args:
        tree: drafts; ``draws`` is not used.
        target: the target's logits at the nodes.
        keys: int64 [num_reqs, at least 1 + max_depth]: column d is the key of the noise
            by which the token after a node of depth d is drawn
            (``uniforms.noise_keys``).

    """

    def draw_tokens(reqs: Tensor, nodes: Tensor) -> Tensor:
        return draw_after(target, reqs, nodes, keys[reqs, tree.depths[reqs, nodes]])

    return follow_draws(tree, draw_tokens)


def coupled_draw_batched(
    tree: TreeBatch, target: TargetLogits, keys: Tensor, sizes: TreeSizes
) -> ScorerOutput:
    """Do what ``coupled_draw`` does, for all nodes together.

    Args:
        tree: drafts; ``draws`` is not used.
        target: the target's logits at the nodes.
        keys: int64 [num_reqs, at least 1 + max_depth], as for ``coupled_draw``.
        sizes: the trees' bounds; only the depth is used.

    """

    def draw_tokens(reqs: Tensor, nodes: Tensor) -> Tensor:
        return draw_coupled(
            target.probs(reqs, nodes), keys[reqs, tree.depths[reqs, nodes]]
        )

    return follow_draws_batched(tree, draw_tokens, sizes)


COUPLED_DRAW = Rule(
    "coupled_draw", coupled_draw, coupled_draw_batched, follows_noise=True
)
