"""Sizes of trees: from the keys alone, those of the proposers, and of drawn trees."""

from __future__ import annotations

import builtins
import io
import os
from collections.abc import Callable, Iterator
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.fast.drafting import CountingDraft, at_temperature, check_bounds, propose
from tests.fast.enumeration import num_models, rand
from tests.fast.languages import BigramDraft, Language, LanguageDraft, random_tables
from tests.fast.scheduled_trees import pruning_plan
from tests.heads import HEADS, RANK_ACCURACIES, write_head
from vllm_treespec.config import METHODS, parse_spec_config
from vllm_treespec.proposers import (
    DynamicTree,
    Hybrid,
    Medusa,
    Proposer,
    ReDrafter,
    SpecInfer,
    SpecTr,
    StaticTree,
    StochasticTree,
)
from vllm_treespec.proposers.static_tree import RANK_ACCURACIES as RANKS_OF_EAGLE
from vllm_treespec.proposers.static_tree import sizes as static_sizes
from vllm_treespec.schedule.plan import PLAIN_PLAN
from vllm_treespec.sources.continuations import Continuation, Continuations
from vllm_treespec.trees.sizes import TreeSizes

NOWHERE = "/nowhere/model"


def keys_of(method: str) -> Iterator[dict[str, Any]]:
    """Spec-configs of a range of shapes, without the method's name."""
    model = {"model": NOWHERE}
    numbers = (1, 2, 3, 5, 7)
    factors = [(1,), (4,), (2, 2, 1), (1, 3), (2, 1, 1, 1), (3, 2, 2), (1, 1, 2)]
    if method == "sd":
        yield from ({**model, "depth": depth} for depth in numbers)
    elif method == "rsd_c":
        yield from ({**model, "branching_factors": own} for own in factors)
    elif method == "specinfer":
        for one, two in product(factors, [None, *factors]):
            trees = [one] if two is None else [one, two]
            yield {"drafts": [{**model, "branching_factors": own} for own in trees]}
    elif method == "suffix_tree":
        for drafts, depth in product(numbers, numbers):
            yield {"num_drafts": drafts, "depth": depth}
    elif method == "redrafter":
        for width, length, kept in product(numbers, numbers, (*numbers, 40, None)):
            keys: dict[str, Any] = {"beam_width": width, "length": length}
            keys["num_drafts"] = kept
            yield {**model, **keys, "tree": "beams"}
            if kept is None:
                yield {**model, **keys, "beam_search": "stochastic"}
            yield {**model, **keys, "tree": "dynamic"}
    elif method in ("eagle_tree", "dflash_tree"):
        for top_k, depth, kept in product(numbers, numbers, (*numbers, 40)):
            keys = {**model, "top_k": top_k, "depth": depth, "num_drafts": kept}
            yield from ({**keys, "tree": tree} for tree in ("dynamic", "stochastic"))
            yield {**keys, "tree": "stochastic", "num_drafts": None}
    elif method == "lyanna":
        for top_k, depth, kept in product(numbers, numbers, (*numbers, 20)):
            keys = {**model, "top_k": top_k, "depth": depth, "num_drafts": kept}
            yield from ({**keys, "tree": tree} for tree in ("dynamic", "stochastic"))
            for left in (1, 4, 9):
                yield {**keys, "resample": "merge", "resample_drafts": left}
            yield {**keys, "tree": "stochastic", "num_drafts": None}
    elif method == "hybrid":
        for drafts, depth, levels in product(numbers, numbers, numbers):
            keys = {**model, "num_drafts": drafts, "depth": depth, "top_k": 3}
            yield {**keys, "model_depth": levels - 1}
    elif method == "medusa_tree":
        yield from ({**model, "num_drafts": drafts} for drafts in (*numbers, 20, 63))
    else:
        key = {"rsd_s": "beam_width", "spectr": "num_paths"}[method]
        for count, depth in product(numbers, numbers):
            yield {**model, key: count, "depth": depth}


@pytest.mark.parametrize("method", METHODS)
def test_validation_reads_no_file_and_builds_nothing(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Red when a spec-config needs the files of its models to be validated."""

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError(f"a validator asked for {args}")

    with monkeypatch.context() as patch:
        for module, name in [
            (builtins, "open"),
            (io, "open"),
            (os, "open"),
            (os, "stat"),
            (METHODS[method], "proposer"),
        ]:
            patch.setattr(module, name, refuse)
        spec = {"method": method, **next(keys_of(method))}
        config = parse_spec_config(spec)
        sizes = [tree.config.sizes for tree in config.scheduled_trees()]
    assert all(1 < own.max_nodes <= 64 for own in sizes)
    assert sizes[0] == config.sizes


@pytest.mark.parametrize("method", [name for name in METHODS if name != "medusa_tree"])
def test_sizes_are_the_proposers(method: str) -> None:
    """Red when the room that a spec-config announces is not what its trees take."""
    for keys in keys_of(method):
        config = parse_spec_config({"method": method, **keys})
        assert config.sizes == config.proposer().sizes, keys


def check_no_larger(built: TreeSizes, bounds: TreeSizes) -> None:
    """Fail where a tree may be larger than its keys allow."""
    announced = asdict(bounds)
    assert all(size <= announced[name] for name, size in asdict(built).items())


@pytest.mark.parametrize(
    ("method", "accuracies"),
    [
        *(
            ("medusa_tree", accuracies)
            for accuracies in (
                RANK_ACCURACIES,
                *(((0.5,),) * 3, ((0.1,) * 9,), ((0.9, 0.0),) * 2),
            )
        ),
        ("eagle_tree", None),
    ],
)
def test_sizes_bound_the_trees_of_a_head(
    method: str, accuracies: Any, tmp_path: Path
) -> None:
    """Red when a head's accuracies make a larger tree than its spec-config allows."""
    own = {} if accuracies is None else {"rank_accuracies": accuracies}
    shape = {} if accuracies else {"tree": "static"}
    model = write_head(tmp_path, HEADS[method], **own)
    for keys in keys_of(method):
        if keys["num_drafts"] is not None:
            spec = {"method": method, **keys, "model": model, **shape}
            config = parse_spec_config(spec)
            check_no_larger(config.proposer().sizes, config.sizes)


def test_what_is_left_out_follows() -> None:
    """Red when a bound that a method leaves out is too small for its trees."""
    sizes = TreeSizes(max_nodes=9, max_depth=3, max_width=3, max_leaves=5)
    assert sizes.num_uniforms == 0
    assert (sizes.max_draws, sizes.max_siblings, sizes.max_parents) == (8, 3, 7)
    small = TreeSizes(max_nodes=4, max_depth=3, max_width=3, max_leaves=3)
    assert small.max_parents == 4
    own = {"max_draws": 9, "max_siblings": 2, "max_parents": 3}
    given = TreeSizes(max_nodes=7, max_depth=2, max_width=4, max_leaves=4, **own)
    assert (given.max_draws, given.max_siblings, given.max_parents) == (9, 2, 3)


# Trees that are drawn

FOUND: list[Continuation] = [(5, [1, 2, 0]), (5, [1, 0]), (2, [2, 2]), (1, [0])]
# More leaves than any tree may have.
WIDE: list[Continuation] = [(9, [token, 0]) for token in range(24)]
Drawn = tuple[Proposer, Language, Tensor | None, dict[str, Any]]


def dynamic() -> Iterator[Drawn]:
    """Dynamic trees, of ties and of one token too."""
    shapes = product((1, 2, 3, 6), (1, 2, 3, 5), (1, 2, 5, 11, 40))
    kinds = ("random", "peaked", "equal", "one_token")
    for shape, kind, seed in product(shapes, kinds, range(2)):
        yield DynamicTree(*shape), random_tables(kind, 4, shape[1], seed)[0], None, {}


def static() -> Iterator[Drawn]:
    """Static trees of several tables of accuracies."""
    accuracies = [RANKS_OF_EAGLE, ((0.5,),) * 3, ((0.1,) * 4,), ((0.4, 0.4),) * 4]
    language = random_tables("random", 4, 4)[0]
    for shape in product((1, 2, 4), (1, 2, 4), (1, 5, 25, 60)):
        for table in accuracies:
            proposer = StaticTree(*shape, table)
            check_no_larger(proposer.sizes, static_sizes(*shape))
            yield proposer, language, None, {}


def stochastic() -> Iterator[Drawn]:
    """Stochastic trees of several requests."""
    shapes = product((1, 2, 6), (1, 2, 5), (1, 2, 5, 11, 40))
    for shape, kind in product(shapes, ("random", "peaked", "one_token")):
        proposer = StochasticTree(*shape)
        uniforms = rand(8, proposer.sizes.num_uniforms)
        yield proposer, random_tables(kind, 4, shape[1])[0], uniforms, {}


def hybrid() -> Iterator[Drawn]:
    """Trees of an index and a model, whose drafts may cost something."""
    language = random_tables("random", 3, 4)[0]
    plans = PLAIN_PLAN, pruning_plan(), pruning_plan(row_cost=0.04)
    for shape in product((1, 2, 7, 12, 40), (1, 4), (1, 3), (1, 3)):
        proposer = Hybrid(*shape, min_probability=0.0)
        for plan, found in product(plans, (FOUND, WIDE)):
            inputs = {"plan": plan, "continuations": [Continuations([found])]}
            yield proposer, language, None, inputs


@pytest.mark.parametrize("trees", [dynamic, static, stochastic, hybrid])
def test_trees_stay_within_their_sizes(trees: Callable[[], Iterator[Drawn]]) -> None:
    """Red when a tree, or a level that is read, outgrows what is announced."""
    for proposer, language, uniforms, inputs in trees():
        num_reqs = 1 if uniforms is None else len(uniforms)
        draft = CountingDraft(LanguageDraft(language, num_reqs))
        tree = propose(proposer, draft, uniforms, **inputs)
        check_bounds(proposer.sizes, tree, draft.widths)


RANKS = ((0.5, 0.25, 0.125), (0.5, 0.25), (0.25, 0.125), (0.25,))
# What the engine makes room for: nodes, levels, width and leaves; and what else counts.
ANNOUNCED: list[tuple[Proposer, tuple[int, int, int, int], dict[str, int | None]]] = [
    (SpecTr(1, 1), (2, 1, 1, 1), {"max_draws": 1, "num_uniforms": 1}),
    (SpecTr(4, 1), (5, 1, 4, 4), {"max_draws": 4, "num_uniforms": 4}),
    (SpecTr(1, 5), (6, 5, 1, 1), {"max_draws": 5, "num_uniforms": 5}),
    (SpecTr(4, 5), (21, 5, 4, 4), {"max_draws": 20, "num_uniforms": 20}),
    (SpecInfer([(2, 2)]), (7, 2, 4, 4), {"max_draws": 6, "num_uniforms": 6}),
    (
        SpecInfer([(2, 2), (1, 1, 1)]),
        (10, 3, 5, 5),
        {"max_draws": 9, "num_uniforms": 9},
    ),
    (
        SpecInfer([(3,), (2, 2)]),
        (10, 2, 5, 7),
        {"max_draws": 9, "num_uniforms": 9},
    ),
    (ReDrafter(6, 5, 16), (17, 5, 6, 6), {"num_beam_tokens": 30, "num_uniforms": 0}),
    (ReDrafter(4, 3, 99), (13, 3, 4, 4), {"num_beam_tokens": 12}),
    (ReDrafter(8, 6, 3), (4, 3, 3, 3), {"num_beam_tokens": 48}),
    (Medusa(8, RANKS), (9, 2, 5, 5), {"num_beam_tokens": None, "num_uniforms": 0}),
    (Medusa(63, [[0.5], [0.5]]), (3, 2, 1, 1), {}),
    (
        DynamicTree(4, 3, 8),
        (9, 3, 7, 7),
        {
            **{"draft_width": 4, "draft_nodes": 8, "num_uniforms": 0},
            **{"max_siblings": 4, "max_parents": 8},
        },
    ),
    (DynamicTree(2, 2, 63), (1 + 2 + 4, 2, 4, 4), {}),
    (DynamicTree(9, 9, 2), (3, 2, 2, 2), {"draft_nodes": 2}),
    (StaticTree(4, 5, 25), (26, 5, 8, 15), {"draft_width": 4, "draft_nodes": 10}),
]


@pytest.mark.parametrize(("proposer", "sizes", "more"), ANNOUNCED)
def test_announced_sizes(
    proposer: Proposer, sizes: tuple[int, ...], more: dict[str, int | None]
) -> None:
    """Red when the engine makes room for more, or less, than the trees can take."""
    beam_tokens = proposer.num_beam_tokens
    own = {**asdict(proposer.sizes), "num_beam_tokens": beam_tokens}
    names = ("max_nodes", "max_depth", "max_width", "max_leaves")
    assert tuple(own[name] for name in names) == sizes
    assert {name: own[name] for name in more} == more
    generator = torch.Generator().manual_seed(0)
    models = [
        BigramDraft(
            torch.randn((99, 99), generator=generator),
            torch.zeros(64, 99),
            torch.zeros(64, dtype=torch.int64),
        )
        for _ in range(num_models(proposer))
    ]
    uniforms = rand(64, proposer.sizes.num_uniforms)
    for temperature in (0.0, 3.0):
        sampling = at_temperature(temperature, 64)
        tree = propose(proposer, models, uniforms, sampling)
        assert tree.max_nodes == proposer.sizes.max_nodes
        check_bounds(proposer.sizes, tree)
    if proposer.sizes.num_uniforms:
        assert int(tree.num_nodes.max()) == tree.max_nodes, "nothing reaches them"
