"""The kernel that follows trees, in Triton's interpreter, against torch's form."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.fast.interpreted import interpreted
from tests.fast.random_trees import random_trees
from vllm_treespec.kernels import follow
from vllm_treespec.kernels.follow import follow_trees
from vllm_treespec.scorers.follow_path import follow_path_batched
from vllm_treespec.trees.sizes import TreeSizes
from vllm_treespec.trees.tree import MAX_NODES

VOCABULARY = 4
MAX_DEPTH = 9


@pytest.fixture(autouse=True, scope="module")
def in_interpreter() -> Iterator[None]:
    """Run the kernel without a card."""
    with interpreted(follow):
        yield


@pytest.mark.parametrize("max_nodes", [2, 9, MAX_NODES])
def test_follows_as_torch_does(max_nodes: int) -> None:
    """Red when a walk, or the place of a request without a tree, is another one."""
    for filling in (0, 3):
        generator = torch.Generator().manual_seed(max_nodes)
        tree = random_trees(5, max_nodes, VOCABULARY, generator)
        limits = torch.randint(1, 1 + max_nodes, (5,), generator=generator)
        tree = tree.cut(torch.where(torch.arange(5) < 3, tree.num_nodes, limits))
        tree_of = torch.tensor([-1, 2, 0, -1, 1, 4, 3, -1], dtype=torch.int32)
        reqs = torch.tensor([int((tree_of == number).nonzero()) for number in range(5)])
        num_rows = torch.where(tree_of >= 0, max_nodes + filling, 1)
        first_rows = torch.nn.functional.pad(num_rows.cumsum(0), (1, 0)).int()
        shape = (int(first_rows[-1]),)
        drawn = torch.randint(VOCABULARY, shape, generator=generator)
        # most tokens are those of a child
        rows = first_rows[reqs, None] + torch.arange(max_nodes)
        is_draft = tree.parents >= 0
        above = rows.gather(1, tree.parents.clamp(min=0))[is_draft]
        drawn[above] = tree.token_ids[is_draft]
        followed = follow_trees(tree, drawn, first_rows, tree_of, MAX_DEPTH)
        sizes = TreeSizes(
            max_nodes=max_nodes, max_depth=MAX_DEPTH, max_width=8, max_leaves=8
        )
        expected = follow_path_batched(tree, drawn[rows], sizes)
        assert followed.scored.path.tolist() == expected.path.tolist()
        assert followed.scored.num_accepted.tolist() == expected.num_accepted.tolist()
        assert (
            followed.scored.next_token_ids.tolist() == expected.next_token_ids.tolist()
        )
        assert followed.emitted[reqs].tolist() == expected.emitted(tree).tolist()
        assert (
            followed.num_emitted[reqs].tolist() == (1 + expected.num_accepted).tolist()
        )
        assert followed.nodes[reqs, 1:].tolist() == expected.path.clamp(min=0).tolist()
        plain = tree_of < 0
        assert followed.num_emitted[plain].tolist() == [1, 1, 1]
        assert (
            followed.emitted[plain, 0].tolist()
            == drawn[first_rows[:-1][plain]].tolist()
        )
        assert (followed.emitted[plain, 1:] == -1).all()
        assert not followed.nodes[:, 0].any()
        if max_nodes > 2:
            assert int(expected.num_accepted.max()) > 1


def test_warm_up() -> None:
    """Red when the warm-up ends an engine's start."""
    follow.warm_up(torch.device("cpu"))
