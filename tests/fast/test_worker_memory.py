"""What a worker reports to the scheduler leaves room for all that it allocates."""

from __future__ import annotations

import copy
import logging
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="it reads layers of vLLM")

from vllm.v1.core.kv_cache_utils import get_kv_cache_configs
from vllm.v1.kv_cache_interface import (
    KVCacheGroupSpec,
    KVCacheSpec,
)

from tests.fast.small_engine import BLOCK_SIZE
from tests.fast.window_layers import GEMMA, WITH_HEAD, grouping_config, layers
from vllm_treespec.engine.kv_cache import (
    cost_of_one_group,
    own_group_first,
    with_fork_blocks,
)
from vllm_treespec.engine.worker import TreeWorkerMixin

AVAILABLE = 1_000_000
PAGE_BYTES, NUM_LAYERS = 1024, 3
NUM_FORK_BLOCKS = 10


@dataclass
class Part:
    """Stands for a layer's KV, a layout, or a source."""

    feature_size: int = 0
    page_size_bytes: int = PAGE_BYTES

    def num_fork_blocks(self, block_size: int, num_groups: int) -> int:
        assert block_size == BLOCK_SIZE
        return NUM_FORK_BLOCKS * num_groups

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

    def __init__(self, feature_size: int, several_groups: bool = False) -> None:
        runner: Any = Runner(Drafter([Part(feature_size)]))
        self.vllm_config = grouping_config(several_groups)
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


def test_cost_of_one_group() -> None:
    """Red when windows cost nothing, or layers of one kind do."""
    assert cost_of_one_group(layers(None, None), 1000) == 1
    assert cost_of_one_group(layers(10, 10), 1000) == 1
    assert cost_of_one_group(layers(None, 1000), 1000) == 1
    assert cost_of_one_group(layers(None, 100, 100, 100), 1000) == 4000 / 1300


@pytest.mark.parametrize("windows", [GEMMA, WITH_HEAD, (None, None)])
def test_forks_of_all_groups_fit(windows: tuple[int | None, ...]) -> None:
    """Red when a block's bytes or the forks of several groups are counted otherwise.

    That is, otherwise than vLLM allocates them with what the worker reports.
    """
    worker = Worker(7, several_groups=True)
    runner: Any = worker.model_runner
    runner.specs = layers(*windows)
    (config,) = get_kv_cache_configs(
        worker.vllm_config,
        [copy.copy(runner.specs)],
        [worker.determine_available_memory()],
    )
    forks = NUM_FORK_BLOCKS * len(config.kv_cache_groups)
    (size,) = {t.size for t in with_fork_blocks(config, forks).kv_cache_tensors}
    features = config.num_blocks * 7 * BLOCK_SIZE
    block = size // (config.num_blocks + forks) + 7 * BLOCK_SIZE
    assert AVAILABLE - block <= size + features <= AVAILABLE


def test_blocks_of_several_sizes_are_refused() -> None:
    """Red when groups with other blocks start, or the remedy does not help."""
    specs = layers(None, 100)
    specs["0"] = replace(specs["0"], head_size=16, head_size_v=16)
    with pytest.raises(ValueError, match=r"of \[16, 32\].*--disable-hybrid"):
        memory_of(specs, several_groups=True)
    assert memory_of(specs, several_groups=False)


def memory_of(specs: dict[str, KVCacheSpec], several_groups: bool) -> int:
    """What a worker with these layers reports."""
    worker = Worker(0, several_groups)
    runner: Any = worker.model_runner
    runner.specs = specs
    return worker.determine_available_memory()


def test_the_group_of_what_drafts_comes_first() -> None:
    """Red when a head's blocks are looked up in another group's table."""
    (spec,) = layers(None).values()
    groups = [KVCacheGroupSpec([a, b], spec) for a, b in ("ab", "cd", "ef")]
    assert own_group_first(groups, set()) == [0, 1, 2]
    assert own_group_first(groups, {"d"}) == [1, 0, 2]
    with pytest.raises(ValueError, match=r"2 KV cache groups.*--disable-hybrid"):
        own_group_first(groups, {"d", "e"})


@pytest.mark.parametrize(
    ("windows", "several_groups", "rank", "says"),
    [
        ((None, 100, 100), False, 0, "1000 tokens takes 2.5 times the KV memory"),
        ((None, 100, 100), False, 1, ""),
        ((None, 100, 100), True, 0, ""),
        ((None, None), False, 0, ""),
    ],
)
def test_the_cost_is_said_once(
    windows: tuple[int | None, ...],
    several_groups: bool,
    rank: int,
    says: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Red when a user's memory is gone without a word, or every rank says it.

    Or when it is said where nothing is gone.
    """
    worker = Worker(0, several_groups)
    runner: Any = worker.model_runner
    runner.specs, runner.parallel_config.rank = layers(*windows), rank
    with caplog.at_level(logging.WARNING, "vllm.treespec"):
        worker.determine_available_memory()
    assert says in caplog.text
    assert bool(says) == bool(caplog.records)
