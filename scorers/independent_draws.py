"""The walk of rules for independent draws from one distribution a node."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from vllm_treespec.sampling.draws import draw
from vllm_treespec.scorers.base import ScorerOutput, TargetLogits, empty_path
from vllm_treespec.scorers.batched import NodeDraws
from vllm_treespec.trees.sizes import TreeSizes
from vllm_treespec.trees.tree import TreeBatch, draw_parents, first_draw, num_draws

# From draft and target distributions [n, vocab_size], drawn tokens int64 [n, width]
# and the number of draws int64 [n] to the chance of each draw to be accepted once
# those before it were rejected, [n, width] (anything behind the last draw), and the
# law of the next token when all were rejected, [n, vocab_size].
Judge = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


def walk_independent_draws(
    tree: TreeBatch, target: TargetLogits, uniforms: Tensor, judge: Judge
) -> ScorerOutput:
    """Walk down each tree; at each node a rule judges all draws together.

    Args:
        tree: drafts with ``draws``; those of one node are independent and come from
            one distribution.
        target: the target's logits at the nodes.
        uniforms: float64 [num_reqs, at least 1 + max_draws] in [0, 1): column 0 for
            the last token, column 1 + i for draw i.
        judge: the rule.

    Raises:
        ValueError: when draws of one node are not independent or come from several
            distributions.

    """
    draws = tree.draws
    assert draws is not None
    check_independent_draws(tree)
    first, counts = first_draw(tree), num_draws(tree)
    reqs = torch.arange(tree.num_reqs, device=tree.token_ids.device)
    node = torch.zeros_like(reqs)
    path, num_accepted = empty_path(tree), torch.zeros_like(reqs)
    residual = target.probs(reqs, node)
    trying = reqs[counts[:, 0] > 0]
    while trying.numel():
        at, row = node[trying], trying[:, None]
        count = counts[trying, at]
        steps = torch.arange(int(count.max()), device=at.device)
        drawn = first[trying, at][:, None] + steps
        drawn = drawn.clamp(max=draws.nodes.shape[1] - 1)
        children = draws.nodes[row, drawn]
        drawn_from = draws.rows[trying, drawn[:, 0]]
        draft = draws.probs_of(trying, drawn_from, residual.shape[1])
        tokens = tree.token_ids[row, children]
        chances, rest = judge(draft, residual[trying], tokens, count)
        accept = (uniforms[row, 1 + drawn] < chances) & (steps < count[:, None])

        any_accepted = accept.any(dim=1)
        lost = trying[~any_accepted]
        residual[lost] = rest[~any_accepted].to(residual.dtype)
        won = trying[any_accepted]
        below = children.gather(1, accept.int().argmax(dim=1, keepdim=True))
        below = below[any_accepted, 0]
        node[won] = below
        path[won, num_accepted[won]] = below
        num_accepted[won] += 1
        residual[won] = target.probs(won, below)
        trying = won[counts[won, below] > 0]
    return ScorerOutput(path, num_accepted, draw(residual, uniforms[:, 0]))


def judge_draws(
    judge: Judge,
    tree: TreeBatch,
    target: TargetLogits,
    uniforms: Tensor,
    sizes: TreeSizes,
    reqs: Tensor,
    parents: Tensor,
) -> tuple[Tensor, Tensor]:
    """Judge the draws of nodes together, for all nodes; see ``batched.TryDraws``."""
    draws = tree.draws
    assert draws is not None
    num_reqs, width = parents.shape
    at = NodeDraws.below(tree, uniforms, sizes, reqs, parents)
    counts = num_draws(tree)[at.reqs, at.nodes]
    residual = target.probs(at.reqs, at.nodes)
    first_rows = draws.rows[at.reqs, at.tried[0]]
    draft = draws.probs_of(at.reqs, first_rows, residual.shape[1])
    chances, rest = judge(draft, residual, at.tokens.t(), counts.clamp(min=1))
    below = at.first_accepted(at.numbers < chances.t())
    residual = torch.where(counts[:, None] > 0, rest.to(residual.dtype), residual)
    return below.view(width, -1).t(), residual.view(width, num_reqs, -1)


def check_independent_draws(tree: TreeBatch) -> None:
    """Raise ValueError unless the draws of every node are one distribution's."""
    draws, parents = tree.draws, draw_parents(tree)
    assert draws is not None
    together = (parents[:, 1:] == parents[:, :-1]) & (parents[:, 1:] >= 0)
    differ = draws.rows[:, 1:] != draws.rows[:, :-1]
    if bool((together & (differ | draws.without_replacement[:, 1:])).any()):
        raise ValueError(
            "this rule needs independent draws from one distribution at every node; "
            "use multi_round or recursive_rejection"
        )
