"""What a head with context is given to read, pair by pair and level by level."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.fast.masked_reads import PAGE, bind_head, committed
from tests.fast.no_waiting import NoWaiting, OnDevice
from tests.fast.small_engine import engine_config
from tests.heads import write_head
from vllm_treespec.batch.stats import StepStats
from vllm_treespec.engine.eagle_head import PagedEagleHead
from vllm_treespec.heads import load_eagle_head
from vllm_treespec.layouts.base import LevelInputs
from vllm_treespec.layouts.node_masks import NodeMasks
from vllm_treespec.sources.base import CommittedTokens
from vllm_treespec.sources.feature_store import MAX_WAITING

HIDDEN_SIZE = 64


class Recorded(PagedEagleHead):
    """Notes what it reads; what it makes of a pair is the pair's feature plus 100."""

    masks: NodeMasks

    def __init__(self, device: torch.device, folder: Path) -> None:
        config = engine_config({"method": "suffix_tree"})
        model = write_head(folder, "eagle", layer_ids=(0, 1))
        super().__init__(config, model, None, "draft_head", StepStats())
        self.head = load_eagle_head(model, 1).to(device)
        bind_head(self, HIDDEN_SIZE, device)

    def _forward(
        self, features: Tensor, token_ids: Tensor, inputs: LevelInputs
    ) -> Tensor:
        self.features, self.token_ids, self.inputs = features, token_ids, inputs
        self.masks_then = self.masks.node_masks.clone()
        return super()._forward(features, token_ids, inputs)

    def _run(
        self,
        attn_metadata: dict[str, Any] | None,
        features: Tensor,
        token_ids: Tensor,
        positions: Tensor,
        slots: Tensor | None,
    ) -> Tensor:
        return features + 100


def some_tokens(device: torch.device) -> CommittedTokens:
    """Two pairs of one request and one of another, as drafting requests have."""
    tokens = committed(device)
    tokens.first[:] = 3, 7
    return tokens


def begin(head: Recorded) -> None:
    """Begin the trees below the pairs that were read."""
    start = {"states": head.last_states, **vars(head.last_roots)}
    head.grow(start, torch.empty(0), depth=2)


@pytest.fixture
def head(tmp_path: Path) -> Recorded:
    """A head whose store has each slot's number as its feature."""
    head = Recorded(torch.device("cpu"), tmp_path)
    head.store.features += torch.arange(len(head.store.features))[:, None]
    return head


def test_pairs_lie_where_their_features_do(head: Recorded) -> None:
    """Red when a pair has another slot, position, feature or second token.

    Request 0 has its last pair at position 4, request 1 at 7; roots lie one further.
    """
    tokens = some_tokens(head.device)
    head.read(tokens)
    assert head.token_ids.tolist() == [4, 5, 18]
    assert head.inputs.positions.tolist() == [3, 4, 7]
    slots = [PAGE + 3, 2 * PAGE, 4 * PAGE + 3]
    assert head.inputs.slots.tolist() == slots
    assert head.features[:, 0].tolist() == slots
    assert head.inputs.query_start_loc.tolist() == [0, 2, 3]
    assert head.inputs.seq_lens.tolist() == [5, 8]


def test_levels_follow_the_last_pairs(head: Recorded) -> None:
    """Red when a level's slots, positions or masks are off, or a parent is another."""
    head.read(some_tokens(head.device))
    begin(head)
    head.extend(torch.tensor([[7, 8, 9]] * 2), torch.zeros((2, 3), dtype=torch.int64))
    root_features = [2 * PAGE + 100, 4 * PAGE + 3 + 100]
    assert head.features[:, 0].tolist() == np.repeat(root_features, 3).tolist()
    assert head.inputs.positions.tolist() == [5] * 3 + [8] * 3
    first, second = 10 * PAGE, 12 * PAGE + 3
    slots = [first + 1, first + 2, first + 3, second + 1, second + 2, second + 3]
    assert head.inputs.slots.tolist() == slots
    head.states[0, :, 0] = torch.tensor([1.0, 2.0, 3.0])
    head.extend(torch.tensor([[5, 6]] * 2), torch.tensor([[1, 2], [0, 2]]))
    assert head.features[:2, 0].tolist() == [2.0, 3.0]
    assert head.inputs.positions.tolist() == [6] * 2 + [9] * 2
    assert head.masks_then[:2].tolist() == [0b010101, 0b101001]


def test_what_is_kept_is_read(head: Recorded) -> None:
    """Red when layers are put together in another order, or into other slots."""
    slots = np.array([PAGE + 3, 2 * PAGE, 4 * PAGE + 3])
    features = {layer: torch.randn(3, HIDDEN_SIZE) for layer in (0, 1)}
    head.keep(slots, features)
    states = torch.cat([features[0], features[1]], dim=1)
    found = head.store.read(torch.from_numpy(slots))
    torch.testing.assert_close(found, head.head.features(states))
    assert list(head.stats.as_dict()["seconds"]) == ["keep_features"]


@pytest.mark.parametrize("what", ["keep", "read", "extend"])
def test_the_host_never_waits(what: str, tmp_path: Path) -> None:
    """Red when keeping or reading waits for the device."""
    device = torch.device("meta")
    head, tokens = Recorded(device, tmp_path), some_tokens(device)
    if what == "keep":
        features = dict.fromkeys((0, 1), torch.empty((3, HIDDEN_SIZE), device=device))
        with NoWaiting():
            head.keep(np.array([5, 6, 9]), features)
        return
    if what == "read":
        with NoWaiting():
            head.read(tokens)
        return
    head.read(tokens)
    ids = torch.zeros((2, 3), dtype=torch.int64, device=device)
    with OnDevice():
        begin(head)
        head.extend(ids, torch.zeros_like(ids))


def test_the_last_feature_of_a_slot_stays(head: Recorded) -> None:
    """Red when a token that is computed again finds the feature of the first time."""
    slots = np.array([5, 6])
    first, second = torch.randn(2, 2, 2 * HIDDEN_SIZE)
    head.store.keep(slots, first)
    head.store.keep(slots[1:], second[1:])
    expected = head.head.features(torch.stack([first[0], second[1]]))
    found = head.store.read(torch.from_numpy(slots))
    torch.testing.assert_close(found, expected)
    assert not head.store.waiting.num_tokens


def test_few_hidden_states_wait(head: Recorded) -> None:
    """Red when steps without trees fill the memory with hidden states."""
    for step in range(2 * MAX_WAITING):
        head.store.keep(np.array([step % 7]), torch.randn(1, 2 * HIDDEN_SIZE))
        assert head.store.waiting.num_tokens < MAX_WAITING
