"""Target draw: follow tokens drawn from the target down the tree."""

from __future__ import annotations

from torch import Tensor

from vllm_treespec.core.sampling import draw
from vllm_treespec.core.sizes import TreeSizes
from vllm_treespec.core.tree import TreeBatch
from vllm_treespec.scorers.base import Rule, ScorerOutput, TargetLogits
from vllm_treespec.scorers.follow_path import follow_draws, follow_draws_batched


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

    def draw_tokens(reqs: Tensor, nodes: Tensor) -> Tensor:
        return draw(target.probs(reqs, nodes), uniforms[reqs, nodes])

    return follow_draws(tree, draw_tokens)


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

    def draw_tokens(reqs: Tensor, nodes: Tensor) -> Tensor:
        return draw(target.probs(reqs, nodes), uniforms[reqs, nodes])

    return follow_draws_batched(tree, draw_tokens, sizes)


TARGET_DRAW = Rule("target_draw", target_draw, target_draw_batched)
