"""The texts that lead to the nodes of trees."""

import torch

from tests.fast.random_trees import random_trees
from vllm_treespec.trees.node_texts import NodeTexts

# Rows of roots: one before the first tree, and some behind each, belong to no node.
NUM_TREES, MAX_NODES, STRIDE = 3, 8, 10
ROOTS = 1 + STRIDE * torch.arange(NUM_TREES)
NUM_ROWS = 1 + STRIDE * NUM_TREES


def test_paths_and_tails_are_those_of_every_node() -> None:
    """Red when a row has another node's path, or tokens of another request's text."""
    generator = torch.Generator().manual_seed(3)
    for _ in range(20):
        tree = random_trees(NUM_TREES, MAX_NODES, 50, generator)
        texts = torch.randint(100, 200, (NUM_TREES, 20), generator=generator)
        num_tokens = torch.tensor([1, 5, 20])
        found = NodeTexts.of_trees(tree, ROOTS, NUM_ROWS, MAX_NODES - 1)
        reqs = (torch.arange(NUM_ROWS) - 1).clamp(min=0) // STRIDE
        tails = found.tails(6, texts, reqs, num_tokens[reqs])
        for row in range(NUM_ROWS):
            req, node = divmod(row - 1, STRIDE)
            path: list[int] = []
            if req >= 0 and node < tree.num_nodes[req]:
                while node:
                    path.insert(0, int(tree.token_ids[req, node]))
                    node = int(tree.parents[req, node])
            assert found.paths[row, : len(path)].tolist() == path
            assert (found.paths[row, len(path) :] == -1).all()
            assert found.depths[row] == len(path)
            text = texts[reqs[row], : num_tokens[reqs[row]]].tolist() + path
            last = text[-6:]
            assert tails[row, -len(last) :].tolist() == last


def test_a_cut_tree_has_no_paths_behind_its_nodes() -> None:
    """Red when what was cut off a tree is still read."""
    generator = torch.Generator().manual_seed(4)
    tree = random_trees(NUM_TREES, MAX_NODES, 50, generator)
    cut = tree.cut(torch.full((NUM_TREES,), 2))
    paths = NodeTexts.of_trees(cut, ROOTS, NUM_ROWS, MAX_NODES - 1).paths
    rows = (paths[:, 0] >= 0).nonzero()[:, 0]
    assert rows.tolist() == (ROOTS + 1)[cut.num_nodes > 1].tolist()
