"""What a one-pass head does with hidden states until it drafts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.fast.masked_reads import PAGE, bind, committed
from tests.fast.no_waiting import NoWaiting
from tests.fast.small_engine import engine_config
from tests.heads import write_head
from vllm_treespec.batch.stats import StepStats
from vllm_treespec.config import parse_spec_config
from vllm_treespec.config.checks import head_joins_groups
from vllm_treespec.engine.dflash_head import PagedDFlashHead
from vllm_treespec.heads import load_dflash_head
from vllm_treespec.sources.base import CommittedTokens
from vllm_treespec.sources.feature_store import MAX_WAITING

HIDDEN_SIZE = 64
SLOTS = [2 * PAGE, 4 * PAGE + 3]


class Recorded(PagedDFlashHead):
    """Notes which keys are written into which slots."""

    def __init__(self, device: torch.device, folder: Path) -> None:
        model = write_head(folder, "dflash", layer_ids=(0,))
        config = engine_config({"method": "suffix_tree"})
        super().__init__(config, model, "draft_head", StepStats())
        self.head = load_dflash_head(model).to(device)
        bind(self, device)
        self.written: list[tuple[Tensor, Tensor]] = []
        self.layers: Any = [
            SimpleNamespace(impl=self, kv_cache=None)
            for _ in range(self.config.num_layers)
        ]

    def do_kv_cache_update(
        self, layer: Any, key: Tensor, value: Tensor, cache: None, slots: Tensor
    ) -> None:
        """Stand for vLLM's attention."""
        self.written.append((slots, key))


def step(device: torch.device, seed: int = 0) -> CommittedTokens:
    """One token of each of two requests, with its hidden states."""
    tokens = committed(device)
    tokens.first[:] = 4, 7
    generator = torch.Generator().manual_seed(seed)
    states = torch.randn((2, HIDDEN_SIZE), generator=generator).to(device)
    return replace(tokens, features={1: states})


@pytest.fixture
def head(tmp_path: Path) -> Recorded:
    """A head on the CPU."""
    return Recorded(torch.device("cpu"), tmp_path)


def test_keys_are_the_later_ones_of_a_slot(head: Recorded) -> None:
    """Red when keys are of other states, positions or slots, or of a former owner."""
    head.read(step(head.device, seed=1))
    head.read(step(head.device, seed=2))
    assert not head.written
    head.write()
    features = head.head.features(step(head.device, seed=2).features[1])
    wanted = head.head.context_kv(features, torch.tensor([4, 7]))
    assert len(head.written) == head.config.num_layers
    for (slots, key), (expected, _) in zip(head.written, wanted, strict=True):
        order = slots.argsort()
        assert slots[order].tolist() == SLOTS
        torch.testing.assert_close(key[order], expected)


def test_few_hidden_states_wait(head: Recorded) -> None:
    """Red when steps without trees fill the memory, or keep the engine's tensors."""
    for number in range(MAX_WAITING):
        head.read(step(head.device, seed=number))
        assert head.waiting.num_tokens < MAX_WAITING
    assert not head.committed.features
    assert len(head.written) == 2 * head.config.num_layers


def test_reading_never_waits(tmp_path: Path) -> None:
    """Red when a step without a tree waits for the device."""
    device = torch.device("meta")
    head, tokens = Recorded(device, tmp_path), step(device)
    with NoWaiting():
        head.read(tokens)


def test_layers_are_in_one_group(tmp_path: Path) -> None:
    """Red when blocks go to layers whose tokens the head does not see.

    Keys that wait would then be written over those of the blocks' new owner.
    """
    model = write_head(tmp_path, "dflash", num_layers=1)
    spec = {"method": "dflash_tree", "model": model, "depth": 3}
    config = parse_spec_config(spec)
    layers = ["full_attention", "sliding_attention"]
    assert config.needs_one_group
    assert not head_joins_groups(config, layers, (1, 64))
