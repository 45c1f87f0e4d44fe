"""Trees that the host makes: nodes, their best ones, and two trees that become one."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.fast.drafting import check_unused, token_paths
from tests.fast.random_trees import random_trees
from vllm_treespec.trees.builders import from_parents
from vllm_treespec.trees.draft import Draft
from vllm_treespec.trees.host_trees import (
    draft_of,
    merge,
    merge_drafts,
    nodes_on_host,
    num_leaves,
)
from vllm_treespec.trees.source import Source
from vllm_treespec.trees.tree import TreeBatch

Path = tuple[int, ...]


def with_claims(tree: TreeBatch, first: float) -> Draft:
    """Trees whose nodes claim ``first``, ``first`` - 1, and so on, row after row."""
    numbers = torch.arange(tree.parents.numel(), dtype=torch.float64)
    claims = first - numbers.view_as(tree.parents)
    return Draft(tree, claims.masked_fill(tree.depths == 0, 0.0))


def some_trees(seed: int, max_nodes: int) -> TreeBatch:
    """Random trees of few tokens, without draws."""
    generator = torch.Generator().manual_seed(seed)
    return replace(random_trees(8, max_nodes, 4, generator), draws=None)


def merged_paths(one: list[Path], other: list[Path]) -> list[Path]:
    """Level by level, children of a node side by side, those of ``one`` first."""
    both = list(dict.fromkeys([*one, *other]))
    paths: list[Path] = [()]
    for above in paths:
        paths += [p for p in both if len(p) == len(above) + 1 and p[:-1] == above]
    return paths


def claims_by_path(draft: Draft, req: int) -> dict[Path, float]:
    """What each draft node claims; unused entries claim nothing."""
    claims = draft.on_host().claims
    assert claims is not None
    paths = token_paths(draft.tree, req)[1:]
    assert not claims[req, len(paths) :].any()
    return dict(zip(paths, claims[req].tolist(), strict=False))


def merged_drafts(one: Draft, other: Draft, max_nodes: int) -> Draft:
    """The trees of an index, and of a model, with places for all nodes."""
    trees = nodes_on_host(one, Source.INDEX)
    places = [max_nodes] * len(trees)
    return merge_drafts(trees, other, Source.MODEL, places, max_nodes)


def check_merged(one: TreeBatch, other: TreeBatch) -> None:
    """Compare merged trees with plain lists."""
    first, second = with_claims(one, 1000.0), with_claims(other, 2000.0)
    max_nodes = one.max_nodes + other.max_nodes - 1
    draft = merged_drafts(first, second, max_nodes)
    tree, sources = draft.tree, draft.on_host().sources
    assert tree.draws is None
    assert sources is not None
    assert tree.max_nodes == max_nodes
    assert tree.token_ids[:, 0].equal(one.token_ids[:, 0])
    for req in range(one.num_reqs):
        own, others = token_paths(one, req), token_paths(other, req)
        found = token_paths(tree, req)
        assert found == merged_paths(own, others)
        assert int(tree.num_nodes[req]) == len(found)
        assert sources[req, : len(found) - 1].tolist() == [
            Source.INDEX * (path in own) + Source.MODEL * (path in others)
            for path in found[1:]
        ]
        assert not sources[req, len(found) - 1 :].any()
        claims = claims_by_path(second, req) | claims_by_path(first, req)
        assert claims_by_path(draft, req) == claims
    check_unused(tree)


def test_merged_trees() -> None:
    """Red when equal prefixes stay two, or the order of nodes is not a tree's.

    So too when a node does not have its sources, or the first one's claim.
    """
    one = from_parents([[9, 1, 2, 3, 4]], [[-1, 0, 0, 1, 2]])
    other = from_parents([[9, 2, 5, 4, 6, 7]], [[-1, 0, 0, 1, 1, 2]])
    drafts = with_claims(one, 9.0), with_claims(other, 9.0)
    tree = merged_drafts(*drafts, 10).tree
    assert tree.token_ids[0, :8].tolist() == [9, 1, 2, 5, 3, 4, 6, 7]
    assert tree.parents[0, :8].tolist() == [-1, 0, 0, 0, 1, 2, 2, 3]
    assert tree.num_nodes.tolist() == [8]
    check_merged(one, other)
    check_merged(other, one)


@pytest.mark.parametrize("seed", range(4))
def test_random_merged_trees(seed: int) -> None:
    """Red when trees of other sizes, or without any draft, are merged wrongly."""
    one, other = some_trees(seed, 9), some_trees(seed + 100, 14)
    check_merged(one, other)
    check_merged(other, one.cut(torch.full_like(one.num_nodes, 3)))
    root = one.cut(torch.ones_like(one.num_nodes))
    check_merged(root, other)
    check_merged(one, root)
    check_merged(one, one)


def test_the_host_and_the_device_have_the_same_trees() -> None:
    """Red when trees change on their way to the host, or back."""
    tree = some_trees(3, 12)
    draft = with_claims(tree, 99.0)
    nodes = nodes_on_host(draft)
    back = draft_of(nodes, tree.token_ids[:, 0], tree.max_nodes)
    for found, wanted in zip(
        vars(back.tree).values(), vars(tree).values(), strict=True
    ):
        assert wanted is None or found.equal(wanted)
    for given, read in zip(
        vars(back.on_host()).values(), vars(draft.on_host()).values(), strict=True
    ):
        assert np.array_equal(given, read)
    for req, of_tree in enumerate(nodes):
        paths = token_paths(tree, req)[1:]
        inner = {path[:-1] for path in paths}
        assert num_leaves(of_tree) == len([path for path in paths if path not in inner])


def test_places_go_to_the_best_new_nodes() -> None:
    """Red when a node that both trees have takes a place, or one loses its parent."""
    one, other = (
        Draft(from_parents([tokens], [parents]), torch.tensor([claims]).double())
        for tokens, parents, claims in (
            ([9, 1, 2], [-1, 0, 1], [0, 0.9, 0.8]),
            ([9, 1, 3, 4, 2, 5], [-1, 0, 0, 1, 1, 2], [0, 0.5, 0.3, 0.3, 0.1, 0.2]),
        )
    )
    (first,) = nodes_on_host(one, Source.INDEX)
    (second,) = nodes_on_host(other, Source.MODEL)
    for places, expected in (
        (0, [(1, 0, 3), (2, 1, 3)]),
        # among equals the earlier one
        (1, [(1, 0, 3), (3, 0, 2), (2, 1, 3)]),
        (2, [(1, 0, 3), (3, 0, 2), (2, 1, 3), (4, 1, 2)]),
        (9, [(1, 0, 3), (3, 0, 2), (2, 1, 3), (4, 1, 2), (5, 2, 2)]),
    ):
        nodes = merge(first, second, places)
        found = [(node.token, node.parent, node.source) for node in nodes]
        assert found == expected


def test_rounded_claims_lose_no_node() -> None:
    """Red when a node whose claim is rounded above its parent's is left out."""
    tree = from_parents([[9, 1, 2, 3]], [[-1, 0, 1, 2]])
    claims = torch.tensor([[0, 0.5, 0.5 + 1e-15, 0.5]], dtype=torch.float64)
    (nodes,) = nodes_on_host(Draft(tree, claims))
    assert len(merge([], nodes, 9)) == 3
    assert [node.claim for node in nodes] == [0.5] * 3


def test_what_the_host_made_is_of_these_trees_alone() -> None:
    """Red when a method that changes an index's trees proposes others than it drew."""
    made = draft_of([[], []], torch.tensor([1, 2]), 3)
    assert made.on_host().num_nodes.tolist() == [1, 1]
    changed = replace(made, tree=from_parents([[1, 5], [2, 6]], [[-1, 0], [-1, 0]]))
    assert changed.on_host().token_ids.tolist() == [[5], [6]]
