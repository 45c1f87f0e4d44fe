"""Sizes of trees: from the keys alone, and those of the proposers that are built."""

from __future__ import annotations

import builtins
import io
import os
from collections.abc import Iterator
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from tests.heads import HEADS, RANK_ACCURACIES, write_head
from vllm_treespec.config import METHODS, parse_spec_config
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
    elif method == "eagle_tree":
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


@pytest.mark.parametrize(
    "accuracies", [RANK_ACCURACIES, ((0.5,),) * 3, ((0.1,) * 9,), ((0.9, 0.0),) * 2]
)
def test_sizes_bound_a_medusa_tree(
    accuracies: tuple[tuple[float, ...], ...], tmp_path: Path
) -> None:
    """Red when a head's accuracies make a larger tree than its spec-config allows."""
    head = write_head(tmp_path, HEADS["medusa_tree"], rank_accuracies=accuracies)
    for keys in keys_of("medusa_tree"):
        config = parse_spec_config({"method": "medusa_tree", **keys, "model": head})
        bounds, built = asdict(config.sizes), asdict(config.proposer().sizes)
        assert all(built[name] <= bound for name, bound in bounds.items()), keys


def test_sizes_bound_a_static_tree(tmp_path: Path) -> None:
    """Red when a static tree grows larger than its spec-config allows."""
    head = write_head(tmp_path, HEADS["eagle_tree"])
    for keys in keys_of("eagle_tree"):
        if keys["num_drafts"] is not None:
            spec = {"method": "eagle_tree", **keys, "model": head}
            config = parse_spec_config({**spec, "tree": "static"})
            bounds, built = asdict(config.sizes), asdict(config.proposer().sizes)
            assert all(built[name] <= bound for name, bound in bounds.items()), keys


def test_what_is_left_out_follows() -> None:
    """Red when a bound that a method leaves out is too small for its trees."""
    sizes = TreeSizes(max_nodes=9, max_depth=3, max_width=3, max_leaves=5)
    assert sizes.num_uniforms == 0
    assert (sizes.max_draws, sizes.max_siblings, sizes.max_parents) == (8, 3, 7)
    small = TreeSizes(max_nodes=4, max_depth=3, max_width=3, max_leaves=3)
    assert small.max_parents == 4
    given = TreeSizes(
        max_nodes=7,
        max_depth=2,
        max_width=4,
        max_leaves=4,
        max_draws=9,
        max_siblings=2,
        max_parents=3,
    )
    assert (given.max_draws, given.max_siblings, given.max_parents) == (9, 2, 3)
