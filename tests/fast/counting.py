"""An engine that counts, without a model: its front-end, scheduler and worker."""

import pickle
import tempfile
from collections.abc import Iterator
from pathlib import Path

import prometheus_client
import pytest
from vllm.config import VllmConfig
from vllm.v1.metrics.prometheus import unregister_vllm_metrics

from tests.fast.small_engine import MODEL_NAME, engine_config, make_scheduler
from vllm_treespec.batch.stats import StepStats
from vllm_treespec.engine.scheduler import TreeDraftTokenIds
from vllm_treespec.metrics import registered_collector, show_counters

# Draft nodes (root excluded) and accepted draft tokens of trees of several sizes.
TREES = [(9, 3), (9, 0), (6, 1), (4, 2)]
# As many as the first two of them have.
MAX_DRAFTS = 9


def config() -> VllmConfig:
    """The config of a new engine."""
    return engine_config({"method": "suffix_tree", "num_drafts": MAX_DRAFTS})


def value(name: str, **labels: str) -> float | None:
    """A counter of engine 0, None when it is not exported."""
    return prometheus_client.REGISTRY.get_sample_value(
        f"vllm:{name}_total", {"model_name": MODEL_NAME, "engine": "0", **labels}
    )


class Engine:
    """What counts in an engine: a worker and its scheduler, a process each."""

    def __init__(self, vllm_config: VllmConfig, log_stats: bool = True) -> None:
        self.worker = StepStats()
        self.scheduler = make_scheduler(vllm_config, log_stats)

    def end_step(self) -> None:
        """Hand over what was counted, as at the end of each step."""
        drafts = TreeDraftTokenIds([], [], {}, self.worker.hand_over())
        self.scheduler.update_draft_token_ids(pickle.loads(pickle.dumps(drafts)))

    def observe(self, trees: list[tuple[int, int]]) -> None:
        """Count the trees of a step."""
        self.worker.count_trees(
            [drafts + 1 for drafts, _ in trees], [n for _, n in trees]
        )

    def run(self, mode: str) -> None:
        """Run a step that counts its mode only."""
        self.worker.count_step(mode)
        self.end_step()


def started(vllm_config: VllmConfig) -> Engine:
    """Start an engine: the front-end first, then the rest."""
    show_counters(vllm_config)
    return Engine(vllm_config)


def shown() -> str:
    """What ``/metrics`` answers."""
    return prometheus_client.generate_latest().decode()


def ours() -> set[str]:
    """What ``/metrics`` answers about draft trees."""
    return {line for line in shown().splitlines() if "vllm:treespec" in line}


def own_metrics(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Give a test its own metrics and temporary folder, for a fixture to yield from."""
    config()  # made once, in the usual temporary folder
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.delenv("PROMETHEUS_MULTIPROC_DIR", raising=False)
    unregister_vllm_metrics()
    yield
    unregister_vllm_metrics()
    prometheus_client.REGISTRY.unregister(registered_collector())
    registered_collector.cache_clear()
