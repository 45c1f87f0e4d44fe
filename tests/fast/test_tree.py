"""Draft trees and the pure functions on them, against goldens and naive Python."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.fast.random_trees import random_parents
from vllm_treespec.layouts.branch_plan import depth_first
from vllm_treespec.trees.builders import from_draws, from_levels, from_parents
from vllm_treespec.trees.tree import (
    MAX_NODES,
    Draws,
    TreeBatch,
    ancestor_bits,
    ancestor_mask,
    ancestors,
    first_child,
    first_draw,
    next_draw,
    num_draws,
)

# The example of TreeBatch's docstring; letters are tokens.
TOKENS = [ord(letter) for letter in "rabcde"]
PARENTS = [-1, 0, 0, 1, 1, 2]


def random_batch(seed: int, max_nodes: int = 14) -> TreeBatch:
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.randint(1, max_nodes + 1, (6,), generator=generator).tolist()
    parents = [random_parents(size, generator) for size in sizes]
    return from_parents(parents, parents)


def lists(tree: TreeBatch) -> list[list[int]]:
    """Parents of each request's nodes."""
    return [
        row[:size]
        for row, size in zip(
            tree.parents.tolist(), tree.num_nodes.tolist(), strict=True
        )
    ]


def path_to(node: int, parents: list[int]) -> list[int]:
    return [] if node < 0 else [*path_to(parents[node], parents), node]


def recursive_walk(node: int, parents: list[int]) -> list[int]:
    children = [i for i, parent in enumerate(parents) if parent == node]
    return [node] + [i for child in children for i in recursive_walk(child, parents)]


def test_docstring_example() -> None:
    """Red when a field or function stops meaning what TreeBatch's docstring shows."""
    tree = from_parents([TOKENS, TOKENS[:1]], [PARENTS, [-1]])
    assert tree.num_reqs == 2
    assert tree.max_nodes == 6
    assert tree.token_ids.tolist() == [TOKENS, [ord("r"), 0, 0, 0, 0, 0]]
    assert tree.parents.tolist() == [PARENTS, [-1] * 6]
    assert tree.depths.tolist() == [[0, 1, 1, 2, 2, 2], [0] * 6]
    assert tree.num_nodes.tolist() == [6, 1]
    assert tree.is_node().tolist() == [[True] * 6, [True] + [False] * 5]
    assert first_child(tree).tolist() == [[1, 3, 5, -1, -1, -1], [-1] * 6]
    mask = ancestor_mask(tree)
    assert mask[0].int().tolist() == [
        [1, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0],
        [1, 0, 1, 0, 0, 0],
        [1, 1, 0, 1, 0, 0],
        [1, 1, 0, 0, 1, 0],
        [1, 0, 1, 0, 0, 1],
    ]
    assert mask[1].equal(torch.eye(6, dtype=torch.bool))
    assert ancestor_bits(tree, 2).tolist() == [
        [0b1, 0b11, 0b101, 0b1011, 0b10011, 0b100101],
        [1, 0, 0, 0, 0, 0],
    ]
    order, paths = depth_first(PARENTS)
    assert "".join(chr(TOKENS[node]) for node in order) == "racdbe"
    assert paths == [[0, 1, 3], [0, 1, 4], [0, 2, 5]]


def test_functions_on_random_trees() -> None:
    """Red when a vectorised tree function differs from its definition."""
    for seed in range(8):
        tree = random_batch(seed, max_nodes=14 if seed else MAX_NODES)
        first = first_child(tree)
        mask, width = ancestor_mask(tree), tree.max_nodes
        for req, parents in enumerate(lists(tree)):
            size = len(parents)
            for node in range(size):
                path = path_to(node, parents)
                children = [i for i, p in enumerate(parents) if p == node]
                assert tree.depths[req, node] == len(path) - 1
                assert first[req, node] == (children[0] if children else -1)
                assert mask[req, node].nonzero()[:, 0].tolist() == path
            assert first[req, size:].tolist() == [-1] * (width - size)
            assert mask[req, size:].equal(torch.eye(width, dtype=torch.bool)[size:])


def test_ancestor_bits_are_the_masks() -> None:
    """Red when a bit goes missing far from the root, or in the sign's place."""
    for seed in range(8):
        tree = random_batch(seed, max_nodes=14 if seed else MAX_NODES)
        if seed == 1:
            parents = list(range(-1, MAX_NODES - 1))
            tree = from_parents([parents], [parents])
        max_depth = int(tree.depths.max())
        mask = ancestor_mask(tree) & tree.is_node()[..., None]
        expected = mask.flatten(0, 1).tolist()
        for depth in (max_depth, max_depth + 1, MAX_NODES):
            found = ancestor_bits(tree, depth).flatten().tolist()
            for bits, seen in zip(found, expected, strict=True):
                assert [bool(bits >> j & 1) for j in range(len(seen))] == seen
                assert (bits < 0) == (len(seen) == MAX_NODES and seen[-1])
            on_host = ancestors(tree.parents[:, 1:].numpy(), depth)
            for of_host, of_device in zip(
                on_host, (ancestor_bits(tree, depth), tree.depths), strict=True
            ):
                used = tree.is_node()
                assert of_host[used].tolist() == of_device[used].tolist()


def test_a_walk_ends_every_path_in_its_leaf() -> None:
    """Red when a leaf's new nodes stop to be one run of the depth-first order."""
    for seed in range(8):
        for parents in lists(random_batch(seed, max_nodes=14 if seed else MAX_NODES)):
            order, paths = depth_first(parents)
            assert order == recursive_walk(0, parents)
            leaves = [path[-1] for path in paths]
            assert sorted(leaves) == sorted(set(range(len(parents))) - set(parents))
            seen: list[int] = []
            for path in paths:
                assert path == path_to(path[-1], parents)
                seen += [node for node in path if node not in seen]
            assert seen == order


def test_any_prefix_is_a_tree() -> None:
    """Red when the scheduler's cut of a draft leaves something that is no tree."""
    for seed in range(4):
        tree = random_batch(seed, max_nodes=9)
        for kept in range(1, 10):
            cut = tree.cut(torch.full((tree.num_reqs,), kept))
            rows = [row[:kept] for row in lists(tree)]
            expected = from_parents(rows, rows)
            width = expected.max_nodes
            assert cut.num_nodes.equal(expected.num_nodes)
            assert cut.parents[:, :width].equal(expected.parents)
            assert bool((cut.parents[:, width:] == -1).all())
            assert first_child(cut)[:, :width].equal(first_child(expected))
            mask = ancestor_mask(cut)
            assert mask[:, :width, :width].equal(ancestor_mask(expected))


def test_cut_takes_one_number_a_request() -> None:
    """Red when a cut of one request touches another's tree."""
    tree = from_parents([TOKENS, TOKENS], [PARENTS, PARENTS])
    cut = tree.cut(torch.tensor([3, 60]))
    assert lists(cut) == [PARENTS[:3], PARENTS]


def test_select_takes_whole_rows() -> None:
    """Red when a field of the tree is forgotten in a selection."""
    tree = random_batch(1)
    shape = (tree.num_reqs, 5)
    draws = Draws(
        nodes=torch.randint(9, shape),
        rows=torch.randint(9, shape),
        without_replacement=torch.rand(shape) > 0.5,
        probs=torch.rand(tree.num_reqs, 2, 3),
        vocabulary=torch.tensor([1, 2, 5]),
    )
    tree = replace(tree, draws=draws)
    rows = torch.tensor([4, 1, 1])
    chosen = tree.select(rows)
    assert chosen.draws is not None
    for name, value in {**vars(tree), **vars(draws)}.items():
        if isinstance(value, torch.Tensor) and name != "vocabulary":
            found = vars(chosen) | vars(chosen.draws)
            assert found[name].equal(value[rows]), name
    assert chosen.draws.vocabulary is draws.vocabulary


def test_probs_of_puts_columns_at_their_tokens() -> None:
    """Red when a draft distribution lands on other tokens than its own."""
    probs = torch.tensor([[[0.1, 0.9], [0.2, 0.8]], [[0.3, 0.7], [0.4, 0.6]]])
    nothing = torch.zeros((2, 0), dtype=torch.int64)
    draws = Draws(nothing, nothing, nothing.bool(), probs)
    reqs, rows = torch.tensor([1, 0, 1]), torch.tensor([0, 1, 1])
    expected = torch.tensor([[0.3, 0.7], [0.2, 0.8], [0.4, 0.6]])
    assert draws.probs_of(reqs, rows, 2).equal(expected)
    hot = replace(draws, vocabulary=torch.tensor([1, 3]))
    scattered = torch.zeros(3, 4)
    scattered[:, [1, 3]] = expected
    assert hot.probs_of(reqs, rows, 4).equal(scattered)


def test_from_levels_leaves_invalid_nodes_out() -> None:
    """Red when dropped nodes shift parents, depths, claims or rows of probabilities."""
    level = torch.tensor([[0.1, 0.2, 0.3], [0.4, 0.5, 0.6]], dtype=torch.float64)
    draft = from_levels(
        torch.tensor([9, 9]),
        [torch.tensor([[1, 2, 3], [1, 2, 3]]), torch.tensor([[4, 5, 6], [4, 5, 6]])],
        [torch.tensor([[0, 0, 0], [0, 0, 0]]), torch.tensor([[0, 2, 2], [0, 1, 1]])],
        [
            torch.tensor([[True, False, True], [True, True, True]]),
            torch.tensor([[False, True, True], [True, True, True]]),
        ],
        torch.rand(2, 4, 10),
        claims=[level, level / 10],
    )
    tree = draft.tree
    assert draft.claims is not None
    assert draft.claims[0].tolist() == pytest.approx([0, 0.1, 0.3, 0.02, 0.03, 0, 0])
    assert draft.claims[1].tolist() == pytest.approx(
        [0, 0.4, 0.5, 0.6, 0.04, 0.05, 0.06]
    )
    assert tree.num_nodes.tolist() == [5, 7]
    assert tree.token_ids.tolist() == [[9, 1, 3, 5, 6, 0, 0], [9, 1, 2, 3, 4, 5, 6]]
    assert tree.parents.tolist() == [
        [-1, 0, 0, 2, 2, -1, -1],
        [-1, 0, 0, 0, 1, 2, 2],
    ]
    assert tree.depths.tolist() == [[0, 1, 1, 2, 2, 0, 0], [0, 1, 1, 1, 2, 2, 2]]
    # The third node of the full tree is the second of the shortened one.
    assert tree.draws is not None
    assert tree.draws.nodes.tolist() == [[1, 2, 3, 4, 0, 0], [1, 2, 3, 4, 5, 6]]
    assert tree.draws.rows[0, :4].tolist() == [0, 0, 3, 3]
    assert tree.draws.rows[1].tolist() == [0, 0, 0, 1, 2, 2]
    assert tree.draws.without_replacement[0, :4].tolist() == [False, True, False, True]
    assert tree.draws.without_replacement[1].tolist() == [
        False,
        True,
        True,
        False,
        False,
        True,
    ]


def merged_example() -> TreeBatch:
    """Three draws at the root (5 twice), then one or two below each of them."""
    return from_draws(
        torch.tensor([9]),
        [torch.tensor([[5, 7, 5]]), torch.tensor([[1, 2, 3, 1]])],
        [torch.tensor([[0, 0, 0]]), torch.tensor([[0, 1, 2, 2]])],
        [torch.tensor([[0, 0, 0]]), torch.tensor([[1, 2, 3, 3]])],
        torch.rand(1, 4, 10),
    )


def test_from_draws_merges_equal_siblings() -> None:
    """Red when a repeat becomes a node, is forgotten, or loses its place in line."""
    tree = merged_example()
    assert tree.num_nodes.tolist() == [6]
    assert tree.token_ids.tolist() == [[9, 5, 7, 1, 3, 2, 0, 0]]
    assert tree.parents.tolist() == [[-1, 0, 0, 1, 1, 2, -1, -1]]
    assert tree.depths.tolist() == [[0, 1, 1, 2, 2, 2, 0, 0]]
    draws = tree.draws
    assert draws is not None
    assert draws.nodes.tolist() == [[1, 2, 1, 3, 4, 3, 5]]
    assert draws.rows.tolist() == [[0, 0, 0, 1, 3, 3, 2]]
    assert not bool(draws.without_replacement.any())
    assert first_draw(tree).tolist() == [[0, 3, 6, -1, -1, -1, -1, -1]]
    assert next_draw(tree).tolist() == [[1, 2, -1, 4, 5, -1, -1]]
    assert num_draws(tree).tolist() == [[3, 3, 1, 0, 0, 0, 0, 0]]


@pytest.mark.parametrize(
    ("num_nodes", "kept"),
    [
        (1, []),
        (2, [1]),
        (3, [1, 2]),
        (4, [1, 2, 1, 3]),
        (5, [1, 2, 1, 3, 4]),
        (6, None),
    ],
)
def test_cut_looks_at_no_draw(num_nodes: int, kept: list[int] | None) -> None:
    """Red when a repeat survives a cut that a new token in its place would not.

    Such a cut depends on what was drawn, and changes the law.
    """
    draws = merged_example().cut(torch.tensor([num_nodes])).draws
    assert draws is not None
    found = [node for node in draws.nodes[0].tolist() if node]
    assert found == ([1, 2, 1, 3, 4, 3, 5] if kept is None else kept)


@pytest.mark.parametrize(
    ("parents", "message"),
    [
        ([-1, 0, 2], "node 2 has parent 2"),
        ([-1, 0, 1, 0], "not in level order"),
        ([0, 0], "not in level order"),
        ([-1, -1], "node 1 has parent -1"),
        ([-1] + [0] * MAX_NODES, "at most 64 fit"),
    ],
)
def test_from_parents_refuses_what_is_no_tree(parents: list[int], message: str) -> None:
    """Red when a malformed tree gets through and fails far away."""
    with pytest.raises(ValueError, match=message):
        from_parents([parents], [parents])
