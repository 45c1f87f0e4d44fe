"""Coupled draw: follow tokens that the target draws by noise known to the drafts."""

from __future__ import annotations

from torch import Tensor

from vllm_treespec.core.coupling import draw_coupled
from vllm_treespec.core.sizes import TreeSizes
from vllm_treespec.core.tree import TreeBatch
from vllm_treespec.scorers.base import Rule, ScorerOutput, TargetLogits
from vllm_treespec.scorers.follow_path import follow_draws, follow_draws_batched


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

    def draw_tokens(reqs: Tensor, nodes: Tensor) -> Tensor:
        keys = uniforms[reqs, tree.depths[reqs, nodes]]
        return draw_coupled(target.probs(reqs, nodes), keys, host_may_wait=True)

    return follow_draws(tree, draw_tokens)


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

    def draw_tokens(reqs: Tensor, nodes: Tensor) -> Tensor:
        keys = uniforms[reqs, tree.depths[reqs, nodes]]
        return draw_coupled(target.probs(reqs, nodes), keys)

    return follow_draws_batched(tree, draw_tokens, sizes)


COUPLED_DRAW = Rule("coupled_draw", coupled_draw, coupled_draw_batched)
