"""What a worker reports to the scheduler leaves room for all that it allocates."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

pytest.importorskip("vllm", reason="it reads layers of vLLM")

from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheSpec,
    SlidingWindowSpec,
)

from vllm_treespec.engine.kv_cache import cost_of_one_group
from vllm_treespec.engine.v1.worker import TreeWorkerMixin

AVAILABLE = 1_000_000
BLOCK_SIZE, PAGE_BYTES, NUM_LAYERS = 16, 1024, 3
NUM_FORK_BLOCKS = 10


@dataclass
class Part:
    """Stands for a layer's KV, a layout, or a source."""

    feature_size: int = 0
    page_size_bytes: int = PAGE_BYTES

    def num_fork_blocks(self, block_size: int) -> int:
        assert block_size == BLOCK_SIZE
        return NUM_FORK_BLOCKS

    def feature_bytes(self, block_size: int) -> int:
        return self.feature_size * block_size


@dataclass
class Decoder:
    """Stands for the decoder."""

    layout: Part = field(default_factory=Part)


@dataclass
class Drafter:
    """Stands for the drafter, with one source."""

    paged: list[Part]


@dataclass
class ParallelConfig:
    """vLLM's."""

    rank: int = 0


@dataclass
class Runner:
    """Stands for the runner."""

    drafter: Drafter
    decoder: Decoder = field(default_factory=Decoder)
    parallel_config: ParallelConfig = field(default_factory=ParallelConfig)
    max_model_len: int = 1000
    specs: dict[str, Any] = field(
        default_factory=lambda: {str(layer): Part() for layer in range(NUM_LAYERS)}
    )

    def get_kv_cache_spec(self) -> dict[str, Any]:
        return self.specs


@dataclass
class CacheConfig:
    """vLLM's."""

    block_size: int = BLOCK_SIZE


class StockWorker:
    """vLLM's."""

    def determine_available_memory(self) -> int:
        return AVAILABLE


class Worker(TreeWorkerMixin, StockWorker):
    """Ours."""

    def __init__(self, feature_size: int) -> None:
        runner: Any = Runner(Drafter([Part(feature_size)]))
        self.model_runner = runner
        cache_config: Any = CacheConfig()
        self.cache_config = cache_config


@pytest.mark.parametrize("feature_size", [0, 7, 1000])
def test_blocks_forks_and_features_fit(feature_size: int) -> None:
    """Red when features or fork blocks are allocated beside the reported memory."""
    page = PAGE_BYTES * NUM_LAYERS
    num_blocks = Worker(feature_size).determine_available_memory() // page
    block = page + feature_size * BLOCK_SIZE
    used = num_blocks * block + NUM_FORK_BLOCKS * page
    assert AVAILABLE - block <= used <= AVAILABLE


def test_too_little_memory_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Red when fork blocks alone fill the memory and the engine starts."""
    monkeypatch.setattr(StockWorker, "determine_available_memory", lambda self: 9_000)
    with pytest.raises(ValueError, match="fork blocks of draft trees need"):
        Worker(0).determine_available_memory()


def layers(*windows: int | None) -> dict[str, KVCacheSpec]:
    """Layers with such windows; None: without."""
    sizes: dict[str, Any] = {
        "block_size": BLOCK_SIZE,
        "num_kv_heads": 1,
        "head_size": 8,
        "dtype": torch.float32,
    }
    return {
        str(number): FullAttentionSpec(**sizes)
        if window is None
        else SlidingWindowSpec(**sizes, sliding_window=window)
        for number, window in enumerate(windows)
    }


def test_cost_of_one_group() -> None:
    """Red when windows cost nothing, or layers of one kind do."""
    assert cost_of_one_group(layers(None, None), 1000) == 1
    assert cost_of_one_group(layers(10, 10), 1000) == 1
    assert cost_of_one_group(layers(None, 1000), 1000) == 1
    assert cost_of_one_group(layers(None, 100, 100, 100), 1000) == 4000 / 1300


@pytest.mark.parametrize(
    ("windows", "rank", "says"),
    [
        ((None, 100, 100), 0, "1000 tokens takes 2.5 times the KV memory"),
        ((None, 100, 100), 1, ""),
        ((None, None), 0, ""),
    ],
)
def test_the_cost_is_said_once(
    windows: tuple[int | None, ...],
    rank: int,
    says: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Red when a user's memory is gone without a word, or every rank says it."""
    worker = Worker(0)
    runner: Any = worker.model_runner
    runner.specs, runner.parallel_config.rank = layers(*windows), rank
    with caplog.at_level(logging.WARNING, "vllm.treespec"):
        worker.determine_available_memory()
    assert says in caplog.text
    assert bool(says) == bool(caplog.records)
