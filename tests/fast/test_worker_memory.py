"""What a worker reports to the scheduler leaves room for all that it allocates."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

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
class Runner:
    """Stands for the runner."""

    drafter: Drafter
    decoder: Decoder = field(default_factory=Decoder)

    def get_kv_cache_spec(self) -> dict[str, Part]:
        return {str(layer): Part() for layer in range(NUM_LAYERS)}


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
