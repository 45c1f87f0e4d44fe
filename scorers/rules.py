"""The registry of rules, and the choice of the rule for each request of a batch."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from vllm_treespec.scorers.base import Rule, ScorerOutput, TargetLogits, path_width
from vllm_treespec.scorers.coupled_draw import COUPLED_DRAW
from vllm_treespec.scorers.greedy import GREEDY_MATCHING
from vllm_treespec.scorers.k_seq import K_SEQ
from vllm_treespec.scorers.multi_round import MULTI_ROUND
from vllm_treespec.scorers.recursive_rejection import RECURSIVE_REJECTION
from vllm_treespec.trees.sizes import TreeSizes
from vllm_treespec.trees.tree import NO_NODE, TreeBatch

# The lossless rules at temperature above 0, by the names used in spec-configs.
RULES: dict[str, Rule] = {
    rule.name: rule for rule in (RECURSIVE_REJECTION, MULTI_ROUND, K_SEQ, COUPLED_DRAW)
}


def score(
    tree: TreeBatch,
    target: TargetLogits,
    numbers: Tensor,
    rule: Rule,
    sizes: TreeSizes | None = None,
) -> ScorerOutput:
    """Score greedy requests by greedy matching and sampled ones by a rule.

    Args:
        tree: the trees.
        target: the target's logits at the nodes.
        numbers: the rule's random numbers, see ``Rule``.
        rule: for sampled requests.
        sizes: the trees' bounds. With them the batched forms run, where the rule has
            one; without them the walks run.

    """
    if rule.batched is None:
        # The rule's walk waits for the device, so greedy requests may walk as well.
        sizes = None
    if target.sampling.all_greedy:
        return GREEDY_MATCHING.apply(tree, target, numbers, sizes)
    if target.sampling.all_random:
        return rule.apply(tree, target, numbers, sizes)
    if sizes is None:
        return walk_mixed(tree, target, numbers, rule)
    greedy = target.sampling.greedy
    sampled = rule.apply(tree, target, numbers, sizes)
    matched = GREEDY_MATCHING.apply(tree, target, numbers, sizes)
    return ScorerOutput(
        torch.where(greedy[:, None], matched.path, sampled.path),
        torch.where(greedy, matched.num_accepted, sampled.num_accepted),
        torch.where(greedy, matched.next_token_ids, sampled.next_token_ids),
    )


def walk_mixed(
    tree: TreeBatch, target: TargetLogits, numbers: Tensor, rule: Rule
) -> ScorerOutput:
    """Walk over greedy and over sampled requests, each with its own rule.

    Args:
        tree: the trees.
        target: the target's logits at the nodes.
        numbers: the rule's random numbers, see ``Rule``.
        rule: for sampled requests.

    """
    greedy = target.sampling.greedy
    path = torch.full_like(tree.parents, NO_NODE)
    num_accepted = torch.zeros_like(tree.num_nodes)
    next_token_ids = torch.zeros_like(tree.num_nodes)
    for is_greedy in (True, False):
        rows = (greedy == is_greedy).nonzero()[:, 0]
        sampling = replace(
            target.sampling.select(rows),
            all_greedy=is_greedy,
            all_random=not is_greedy,
        )
        part = target.select(rows, sampling)
        own_rule = GREEDY_MATCHING if is_greedy else rule
        scored = own_rule.walk(tree.select(rows), part, numbers[rows])
        path[rows, : scored.path.shape[1]] = scored.path
        num_accepted[rows] = scored.num_accepted
        next_token_ids[rows] = scored.next_token_ids
    return ScorerOutput(path[:, : path_width(tree)], num_accepted, next_token_ids)
