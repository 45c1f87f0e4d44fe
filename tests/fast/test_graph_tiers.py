"""How many rows the requests of a step bring, so that it has a CUDA graph."""

from __future__ import annotations

import pytest

from vllm_treespec.engine.v2.tiers import (
    can_fill,
    drafts_by_batch_size,
    enough,
    fitting,
    tiers,
)
from vllm_treespec.trees.tree import MAX_NODES


@pytest.mark.parametrize(
    ("max_nodes", "expected"),
    [
        (2, (1, 8)),
        (8, (1, 8)),
        (9, (1, 8, 16)),
        (32, (1, 8, 16, 32)),
        (33, (1, 8, 16, 32, 40)),
        (64, (1, 8, 16, 32, 64)),
    ],
)
def test_tiers(max_nodes: int, expected: tuple[int, ...]) -> None:
    """Red when a tier lies between vLLM's capture sizes, or a tree fits none."""
    assert tiers(max_nodes) == expected
    assert tiers(expected[-1]) == expected


def test_vllms_key() -> None:
    """Red when an engine for few requests has no graph of the largest tree."""
    assert drafts_by_batch_size(32) == [(1, 1, 31), (2, 2, 0), (3, 3, 15), (4, 4, 7)]
    for max_nodes in range(2, MAX_NODES + 1):
        rows = {1 + drafts for _, _, drafts in drafts_by_batch_size(max_nodes)}
        assert rows == set(tiers(max_nodes))


def test_rows_of_a_request() -> None:
    """Red when a request gets more rows than there are, or a tree too few."""
    some = tiers(32)
    assert [fitting(rows, some) for rows in (1, 5, 8, 15, 16, 40)] == [
        1,
        5,
        8,
        8,
        16,
        32,
    ]
    assert [enough(rows, some) for rows in (1, 2, 8, 9, 32)] == [1, 8, 8, 16, 32]


def test_which_steps_are_filled() -> None:
    """Red when a prompt, or a request without room, is filled up."""
    reserved = {"a": [-1] * 15, "b": [-1] * 7}
    assert can_fill({"a": 16, "b": 8}, reserved, 8)
    assert not can_fill({"a": 16, "b": 8}, reserved, 16)
    assert not can_fill({"a": 16, "prompt": 40}, reserved, 8)
    assert not can_fill({"a": 16, "without trees": 1}, reserved, 8)
