"""Trees whose laws are enumerated: every proposer's, by the rules that verify them."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import product

import torch

from tests.fast.drafting import draws_of, propose, together
from tests.fast.enumeration import Weighted, all_trees, num_models
from tests.fast.languages import Language, random_tables
from vllm_treespec.proposers import (
    DynamicTree,
    Hybrid,
    Proposer,
    ReDrafter,
    RsdC,
    RsdS,
    Sd,
    SpecInfer,
    SpecTr,
    StaticTree,
    StochasticTree,
)
from vllm_treespec.schedule.plan import StepPlan
from vllm_treespec.sources.base import Continuations
from vllm_treespec.trees.builders import from_draws
from vllm_treespec.trees.tree import TreeBatch

# Proposers by name, with the size of the vocabulary.
Trees = dict[str, tuple[int, Proposer]]
WITHOUT_REPLACEMENT: Trees = {
    "sd 2": (3, Sd(2)),
    "sd 3": (5, Sd(3)),
    "sd 6": (3, Sd(6)),
    "rsd_c 3": (4, RsdC((3,))),
    "rsd_c 4": (5, RsdC((4,))),
    "rsd_c 2x1": (4, RsdC((2, 1))),
    "rsd_c 2x2": (3, RsdC((2, 2))),
    "rsd_c 2x2 of 4": (4, RsdC((2, 2))),
    "rsd_c 3x1": (5, RsdC((3, 1))),
    "rsd_c 2x1x1": (3, RsdC((2, 1, 1))),
    "rsd_c 1x2x1": (4, RsdC((1, 2, 1))),
    "rsd_s 2": (3, RsdS(2, 2)),
    "rsd_s 2 of 4": (4, RsdS(2, 2)),
    "rsd_s 3": (3, RsdS(3, 2)),
    "stochastic 2, best 2": (3, StochasticTree(2, 2, 2)),
    "stochastic 2, best 3": (3, StochasticTree(2, 2, 3)),
    "stochastic 2, best 4": (3, StochasticTree(2, 2, 4)),
    "stochastic 2 of 4, best 4": (4, StochasticTree(2, 2, 4)),
    "stochastic 2 of 4, best 5": (4, StochasticTree(2, 2, 5)),
    "stochastic 3, best 4": (3, StochasticTree(3, 2, 4)),
    "stochastic 3, best 7": (3, StochasticTree(3, 2, 7)),
    "likely sd 3": (4, Sd(3, 0.1)),
    "likely rsd_c 2x1": (4, RsdC((2, 1), 0.19)),
    "likely rsd_c 2x2": (3, RsdC((2, 2), 0.3)),
    "likely rsd_s 2": (4, RsdS(2, 2, 0.19)),
}
INDEPENDENT: Trees = {
    "3 draws": (3, SpecTr(3, 1)),
    "3 draws of 5": (5, SpecTr(3, 1)),
    "2 paths": (3, SpecTr(2, 2)),
    "3 paths of 2": (2, SpecTr(3, 2)),
    "2 long paths of 2": (2, SpecTr(2, 3)),
    "tree": (4, SpecInfer([(2, 1)])),
}
SEVERAL_MODELS: Trees = {
    "2 models": (4, SpecInfer([(1,), (1,)])),
    "2 models, 2x2": (3, SpecInfer([(1, 1), (1, 1)])),
    "2 models, 3 draws": (3, SpecInfer([(2,), (1, 1)])),
    "2 models, trees of 2": (2, SpecInfer([(2, 2), (1, 2)])),
    "3 models of 2": (2, SpecInfer([(1, 1), (1,), (2, 1)])),
}
DETERMINISTIC: Trees = {
    **{f"dynamic {n}": (3, DynamicTree(n, 2, 3 * n)) for n in (1, 2, 3)},
    **{f"static {n}": (3, StaticTree(3, 2, n)) for n in (3, 6, 12)},
    **{f"redrafter {n}": (3, ReDrafter(n, 2, 2 * n)) for n in (1, 3)},
}
TREES: dict[str, Trees] = {
    "recursive_rejection": WITHOUT_REPLACEMENT,
    "multi_round": {**INDEPENDENT, **SEVERAL_MODELS},
    "k_seq": INDEPENDENT,
    "optimal_transport": {"3 draws": (3, SpecTr(3, 1)), "2 paths": (3, SpecTr(2, 2))},
    "coupled_draw": {**DETERMINISTIC, "2 paths": (3, SpecTr(2, 2))},
}


@cache
def drawn_trees(rule: str, name: str, kind: str) -> tuple[Weighted, Language]:
    """Every tree of a proposer over random languages, and the target's language.

    By the noise of this seed draws below a node decide whether it is in a tree.
    """
    vocab_size, proposer = TREES[rule][name]
    depth = proposer.sizes.max_depth
    tables = [random_tables(kind, vocab_size, depth, seed=seed) for seed in (0, 7, 8)]
    models = [draft for draft, _ in tables]
    drawn = all_trees(proposer, models[: num_models(proposer)], seed=5)
    return drawn, tables[0][1]


def mixed_draws(one: Language, other: Language) -> Weighted:
    """Two draws of one model without replacement, then two of another one's."""
    size, (p, q) = one.vocab_size, (one.table[0], other.table[0])
    tokens = torch.tensor([t for t in product(range(size), repeat=4) if t[0] != t[1]])
    first, rest, *others = tokens.T
    left = p.repeat(size, 1).fill_diagonal_(0).sum(1)
    weights = p[first] * p[rest] / left[first] * q[others[0]] * q[others[1]]
    tokens, weights = tokens[weights > 0], weights[weights > 0]
    roots, none = torch.zeros(len(tokens), dtype=torch.int64), torch.zeros_like(tokens)
    rows = none + torch.tensor([0, 0, 1, 1])
    probs = torch.stack([p, q]).expand(len(tokens), 2, size)
    tree = from_draws(roots, [tokens], [none], [rows], probs)
    is_rest = torch.tensor([False, True, False, False]).expand_as(tokens)
    draws = replace(draws_of(tree), without_replacement=is_rest)
    return Weighted(replace(tree, draws=draws), weights)


def side_by_side(one: Weighted, other: Weighted) -> Weighted:
    """Both sets of trees in one batch, each with half of its weight."""
    tree = together([one.tree, other.tree])
    return Weighted(tree, torch.cat([one.weights, other.weights]) / 2)


def found_and_drafted(plan: StepPlan, draft: Language | None) -> TreeBatch:
    """A tree of what an index found, and of a draft model if there is one."""
    found = [(5, [1, 2, 0]), (5, [1, 0]), (2, [2, 2]), (1, [0])]
    return propose(
        Hybrid(5, depth=2, top_k=2, model_depth=2, min_probability=0.0),
        () if draft is None else draft,
        continuations=[Continuations([found])],
        plan=plan,
    )
