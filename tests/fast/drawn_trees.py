"""Every tree that can be drawn from small languages along a plan, with its weight."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tests.fast.enumeration import Weighted
from tests.fast.languages import Language
from vllm_treespec.trees.builders import from_draws
from vllm_treespec.trees.tree import Draws, TreeBatch


@dataclass(frozen=True)
class Planned:
    """One draw of a plan."""

    # index within the draws of the level above, 0 in the first level
    parent: int = 0
    # index of the draft model
    model: int = 0
    # without replacement of the draw before it; first level only
    without_replacement: bool = False


Plan = list[list[Planned]]


def independent(num_draws: int) -> Plan:
    """One level of independent draws."""
    return [[Planned()] * num_draws]


def paths(num_paths: int, depth: int, num_models: int = 1) -> Plan:
    """Independent paths side by side, the models taking turns."""
    return [
        [Planned(k if level else 0, k % num_models) for k in range(num_paths)]
        for level in range(depth)
    ]


def drawn_trees(models: list[Language], plan: Plan) -> Weighted:
    """Every outcome of the plan's draws; equal siblings are one node."""
    vocab_size, num_prefixes = models[0].vocab_size, len(models[0].table)
    probs = torch.cat([model.table for model in models])
    weights = torch.ones(1, dtype=torch.float64)
    above = torch.zeros((1, 1), dtype=torch.int64)
    levels: list[tuple[Tensor, Tensor, Tensor]] = []
    for level in plan:
        tokens = torch.zeros((len(weights), 0), dtype=torch.int64)
        rows, prefixes = tokens, tokens
        left = torch.empty(0)
        for planned in level:
            prefix = above[:, planned.parent]
            row = planned.model * num_prefixes + prefix
            if planned.without_replacement:
                left = left.scatter(1, tokens[:, -1:], 0.0)
                left = left / left.sum(1, keepdim=True)
            else:
                left = probs[row]
            tree, token = (left > 0).nonzero(as_tuple=True)
            weights = weights[tree] * left[tree, token]
            child = prefix[tree] * vocab_size + 1 + token
            tokens = torch.cat([tokens[tree], token[:, None]], 1)
            rows = torch.cat([rows[tree], row[tree, None]], 1)
            prefixes = torch.cat([prefixes[tree], child[:, None]], 1)
            levels = [(t[tree], p[tree], r[tree]) for t, p, r in levels]
            above, left = above[tree], left[tree]
        parents = torch.tensor([planned.parent for planned in level])
        levels.append((tokens, parents.expand(len(tokens), -1), rows))
        above = prefixes
    return Weighted(build(levels, probs, plan[0]), weights)


def build(
    levels: list[tuple[Tensor, Tensor, Tensor]], probs: Tensor, first: list[Planned]
) -> TreeBatch:
    """The trees of the enumerated draws."""
    tokens, parents, rows = zip(*levels, strict=True)
    roots = torch.zeros(len(tokens[0]), dtype=torch.int64)
    every = probs.expand(len(roots), *probs.shape)
    tree = from_draws(roots, tokens, parents, rows, every)
    assert tree.draws is not None
    without_replacement = tree.draws.without_replacement.clone()
    without_replacement[:, : len(first)] = torch.tensor(
        [planned.without_replacement for planned in first]
    )
    return replace(
        tree, draws=replace(tree.draws, without_replacement=without_replacement)
    )


def side_by_side(one: Weighted, other: Weighted) -> Weighted:
    """Both sets of trees in one batch, each with half of its weight."""
    trees = (one.tree, other.tree)
    draws = [tree.draws for tree in trees if tree.draws is not None]
    tree = TreeBatch(
        torch.cat([tree.token_ids for tree in trees]),
        torch.cat([tree.parents for tree in trees]),
        torch.cat([tree.depths for tree in trees]),
        torch.cat([tree.num_nodes for tree in trees]),
        draws=Draws(
            nodes=torch.cat([d.nodes for d in draws]),
            rows=torch.cat([d.rows for d in draws]),
            without_replacement=torch.cat([d.without_replacement for d in draws]),
            probs=torch.cat([d.probs for d in draws]),
        ),
    )
    return Weighted(tree, torch.cat([one.weights, other.weights]) / 2)


def as_if_drawn(tree: TreeBatch, draft: Language) -> TreeBatch:
    """Call likeliest tokens draws without replacement, which they are not."""
    nodes = torch.arange(1, tree.max_nodes).expand(tree.num_reqs, -1)
    draws = Draws(
        nodes=nodes.masked_fill(~tree.is_node()[:, 1:], 0),
        rows=tree.parents[:, 1:].clamp(min=0),
        without_replacement=tree.parents[:, 1:] == tree.parents[:, :-1],
        probs=draft.table[draft.prefixes(tree)],
    )
    return replace(tree, draws=draws)
