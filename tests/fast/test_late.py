"""Trees that are bound late: what remains of a step's placeholders."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from vllm_treespec.batch.matching import Proposal
from vllm_treespec.batch.requests import RequestSlots
from vllm_treespec.engine.v2.late import by_request, trim
from vllm_treespec.trees.builders import from_parents
from vllm_treespec.trees.draft import Draft

RESERVED = {"a": [-1] * 15, "b": [-1] * 7, "c": [-1] * 7}


@dataclass
class Scheduled:
    """What ``trim`` changes of a scheduler's output."""

    num_scheduled_tokens: dict[str, int]
    total_num_scheduled_tokens: int
    scheduled_spec_decode_tokens: dict[str, list[int]]


def trimmed(drafts: dict[str, list[int]], fill: int) -> Any:
    """Trim the placeholders of three requests."""
    before: Any = Scheduled({"a": 16, "b": 8, "c": 8}, 32, RESERVED)
    return trim(before, drafts, fill)


def test_trees_keep_as_many_placeholders() -> None:
    """Red when a request without a tree reads rows, or one with a tree too few."""
    after = trimmed({"a": [5, 6], "c": [7]}, 0)
    assert after.num_scheduled_tokens == {"a": 3, "b": 1, "c": 2}
    assert after.total_num_scheduled_tokens == 6
    kept = {"a": [-1] * 2, "c": [-1]}
    assert after.scheduled_spec_decode_tokens == kept
    assert [len(reserved) for reserved in RESERVED.values()] == [15, 7, 7]


def test_steps_with_a_graph_are_filled() -> None:
    """Red when a request brings other rows than the graph has."""
    after = trimmed({"a": [5, 6], "c": [7]}, 7)
    assert after.num_scheduled_tokens == {"a": 8, "b": 8, "c": 8}
    assert after.total_num_scheduled_tokens == 24


def test_discarded_trees_belong_to_nobody() -> None:
    """Red when a discarded tree's part goes to the request in the last slot."""
    trees = from_parents([[1, 2], [4, 5]], [[-1, 0], [-1, 0]])
    places = np.array([0, 1])
    proposal = Proposal.from_draft(Draft(trees), 0, 3, places, places)
    slots = RequestSlots(0)
    for name in ("first", "last"):
        slots.add(name, True, None, 8)
    found = by_request(proposal.without(np.array([0])), [[7], [9]], slots)
    assert found == {"last": [9]}
