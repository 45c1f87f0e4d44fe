"""Ranks on the V2 runner notice trees that differ, a step later."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from vllm_treespec.batch.matching import Proposal
from vllm_treespec.engine.v2 import ranks
from vllm_treespec.engine.v2.ranks import RankCheck, checksum
from vllm_treespec.step.decoder import RanksDiffer
from vllm_treespec.trees.builders import from_parents
from vllm_treespec.trees.draft import Draft

TREES = from_parents([[1, 2, 3], [4, 5, 6]], [[-1, 0, 0], [-1, 0, 1]])
PROPOSAL = Proposal.from_draft(Draft(TREES), 0, 3, np.array([0, 1]), np.array([0, 1]))


class Ranks:
    """Two ranks of which the other one has the checksums given."""

    world_size = 2
    cpu_group = None

    def __init__(self, of_other: list[int]) -> None:
        """Begin with the first comparison."""
        self.of_other = iter(of_other)

    def all_reduce(self, values: Tensor, *args: Any, **options: Any) -> Any:
        """Take the maximum with the other rank's values."""
        number = next(self.of_other)
        values.copy_(torch.maximum(values, torch.tensor([number, -number])))
        return SimpleNamespace(wait=lambda: None)


def check_of(
    monkeypatch: pytest.MonkeyPatch, of_other: list[int], world_size: int = 2
) -> RankCheck:
    """Make a check on such ranks."""
    group = Ranks(of_other)
    group.world_size = world_size
    monkeypatch.setattr(ranks, "get_tp_group", lambda: group)
    monkeypatch.setattr(ranks, "all_reduce", group.all_reduce)
    return RankCheck()


def test_same_trees(monkeypatch: pytest.MonkeyPatch) -> None:
    """Red when ranks with the same trees stop each other."""
    check = check_of(monkeypatch, [checksum(PROPOSAL, step) for step in range(4)])
    for step in range(4):
        check.compare(PROPOSAL, step)


@pytest.mark.parametrize("difference", [-1, 1])
def test_other_trees(monkeypatch: pytest.MonkeyPatch, difference: int) -> None:
    """Red when a rank with other trees goes on for more than a step."""
    numbers = [checksum(PROPOSAL, 0), checksum(PROPOSAL, 1) + difference, 0]
    check = check_of(monkeypatch, numbers)
    check.compare(PROPOSAL, 0)
    check.compare(PROPOSAL, 1)
    with pytest.raises(RanksDiffer, match="same kind of device"):
        check.compare(PROPOSAL, 2)


def test_one_rank_compares_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Red when an engine on one device compares."""
    check = check_of(monkeypatch, [], world_size=1)
    check.compare(PROPOSAL, 0)


def test_checksum() -> None:
    """Red when trees that differ in a token, a parent, a slot or a step look alike."""
    other_tokens, other_parents = PROPOSAL.token_ids.copy(), PROPOSAL.parents.copy()
    other_tokens[1, 1] += 1
    other_parents[0, 1] = 1
    others = [
        (replace(PROPOSAL, token_ids=other_tokens), 3),
        (replace(PROPOSAL, parents=other_parents), 3),
        (replace(PROPOSAL, slots=np.array([0, 2])), 3),
        (PROPOSAL, 4),
    ]
    assert checksum(PROPOSAL, 3) not in {checksum(*other) for other in others}
    assert checksum(PROPOSAL, 3) == checksum(replace(PROPOSAL), 3)
