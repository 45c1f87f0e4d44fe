"""The file in which a scheduler counts for its front-end."""

import errno
import logging
import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import prometheus_client
import pytest
from prometheus_client.mmap_dict import MmapedDict
from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.metrics.prometheus import get_prometheus_registry

from tests.fast.counting import (
    TREES,
    Engine,
    config,
    own_metrics,
    shown,
    started,
    value,
)
from tests.fast.small_engine import MODEL_NAME
from vllm_treespec import metrics, plugin
from vllm_treespec.batch.stats import StepStats
from vllm_treespec.engine import request_check
from vllm_treespec.metrics import (
    SharedCounters,
    registered_collector,
    show_counters,
)


@pytest.fixture(autouse=True)
def clean(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Give each test its own metrics and its own temporary folder."""
    yield from own_metrics(tmp_path, monkeypatch)


@pytest.fixture
def warnings(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The lines that we print."""
    found: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: found.append(record.getMessage())  # type: ignore[method-assign]
    monkeypatch.setattr(metrics.logger, "handlers", [handler])
    monkeypatch.setattr(metrics.logger, "propagate", False)
    return found


def test_several_api_servers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, warnings: list[str]
) -> None:
    """Red when servers that gather their metrics in a folder lose ours."""
    folder = tmp_path / "prometheus"
    folder.mkdir()
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(folder))
    engine = started(config())
    # The other servers' configs name engines that nobody starts.
    show_counters(config())
    engine.run("rsd_s")
    text = prometheus_client.generate_latest(get_prometheus_registry()).decode()
    assert (
        'treespec_num_steps_total{engine="0",mode="rsd_s",model_name="smol"} 1.0'
        in text
    )
    assert "vllm:treespec_num_nodes_verified_total" in text
    assert warnings == []
    assert [path.name for path in tmp_path.iterdir()] == ["prometheus"]


# What a scheduler does in a process of its own, which gets its config and what workers
# hand over by pickle.
OTHER_PROCESS = """
import pickle, sys
from vllm_treespec.metrics import open_counters
counters = open_counters(pickle.load(sys.stdin.buffer))
print("ready", flush=True)
while True:
    try:
        counters.add(pickle.load(sys.stdin.buffer))
    except EOFError:
        break
    print("added", flush=True)
"""


def as_read(config: VllmConfig) -> SimpleNamespace:
    """What the other process reads of a config; it need not import vLLM for that."""
    model_name = config.model_config.served_model_name
    return SimpleNamespace(
        instance_id=config.instance_id,
        model_config=SimpleNamespace(served_model_name=model_name),
        parallel_config=SimpleNamespace(rank=0, data_parallel_index=0),
    )


def test_scheduler_in_another_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Red when the front-end misses what another process counts, or a file stays."""
    folder = tmp_path / "prometheus"
    folder.mkdir()
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(folder))
    vllm_config = config()
    show_counters(vllm_config)
    worker = StepStats()
    other = subprocess.Popen(
        [sys.executable, "-c", OTHER_PROCESS],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )
    with other:
        assert other.stdin is not None
        assert other.stdout is not None
        pickle.dump(as_read(vllm_config), other.stdin)
        other.stdin.flush()
        assert other.stdout.readline() == b"ready\n"
        assert [path.name for path in tmp_path.iterdir()] == ["prometheus"]
        for times in (1, 2):
            worker.count_step("rsd_s")
            pickle.dump(worker.hand_over(), other.stdin)
            other.stdin.flush()
            assert other.stdout.readline() == b"added\n"
            found = get_prometheus_registry().get_sample_value(
                "vllm:treespec_num_steps_total",
                {"model_name": MODEL_NAME, "engine": "0", "mode": "rsd_s"},
            )
            assert found == times
        other.stdin.close()
    assert other.returncode == 0
    assert (
        "treespec_num_steps"
        in prometheus_client.generate_latest(get_prometheus_registry()).decode()
    )


@pytest.mark.parametrize("end", ["scheduler first", "front-end first", "no scheduler"])
def test_no_file_stays(tmp_path: Path, end: str) -> None:
    """Red when engines leave files behind, however their processes end."""
    vllm_config = config()
    show_counters(vllm_config)
    (file,) = tmp_path.iterdir()
    assert file.stat().st_mode & 0o777 == 0o600
    if end == "no scheduler":
        registered_collector().show_engines(config())
        (other,) = tmp_path.iterdir()
        assert other != file
        # As at the end of the process.
        remove = registered_collector()._remove
        assert remove is not None
        remove()
    else:
        engine = Engine(vllm_config)
        # Without a name it goes when nobody has it open, also after a SIGKILL.
        assert list(tmp_path.iterdir()) == []
        if end == "front-end first":
            registered_collector()._files[0].close()
            engine.run("plain")
        else:
            del engine
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("asked", [False, True])
def test_no_statistics_no_file(tmp_path: Path, asked: bool) -> None:
    """Red when an engine without statistics counts for anybody."""
    vllm_config = config()
    if asked:
        # Another front-end asked, the engine itself keeps no statistics.
        show_counters(vllm_config)
    before = list(tmp_path.iterdir())
    engine = Engine(vllm_config, log_stats=asked is False)
    engine.run("rsd_s")
    assert list(tmp_path.iterdir()) == before
    assert "treespec" not in shown()
    assert engine.worker.as_dict()["modes"] == {"rsd_s": 1}


def test_only_rank_0_shares() -> None:
    """Red when every rank of an external launcher counts the same step."""
    vllm_config = config()
    show_counters(vllm_config)
    for rank in (1, 0):
        vllm_config.parallel_config.rank = rank
        Engine(vllm_config).run("rsd_s")
    assert value("treespec_num_steps", mode="rsd_s") == 1


def test_serving_goes_on_without_metrics(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, warnings: list[str]
) -> None:
    """Red when a full or forbidden temporary folder stops an engine."""
    vllm_config = config()
    show_counters(vllm_config)
    with monkeypatch.context() as patch:

        def full(*args: Any) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        patch.setattr(metrics.os, "posix_fallocate", full)
        show_counters(config())
        patch.setattr(tempfile, "tempdir", str(tmp_path / "nowhere"))
        started(config()).run("rsd_s")
    assert ["No space left" in line for line in warnings] == [True, False]
    assert all(line.startswith("No metrics of draft trees: ") for line in warnings)
    assert "treespec" not in shown()
    assert list(tmp_path.iterdir()) == []
    # A scheduler that may not open the file.
    monkeypatch.setattr(metrics, "MmapedDict", Forbidden)
    engine = started(config())
    engine.observe(TREES)
    engine.run("rsd_s")
    assert warnings[2] == "No metrics of draft trees: [Errno 13] Permission denied"


@pytest.mark.usefixtures("aids_may_fail")
@pytest.mark.parametrize(
    ("where", "function", "without"),
    [
        (metrics, "counter_files", "/metrics lacks them"),
        (metrics, "counter_file", "/metrics lacks them"),
        (MmapedDict, "__init__", "their metrics stand still"),
        (MmapedDict, "write_value", "their metrics stand still"),
        (SharedCounters, "add", "their metrics stand still"),
        (MmapedDict, "read_all_values_from_file", "/metrics lacks them"),
    ],
)
def test_an_error_in_counting_ends_nothing(
    monkeypatch: pytest.MonkeyPatch,
    warnings: list[str],
    where: Any,
    function: str,
    without: str,
) -> None:
    """Red when an unforeseen error in counting ends an engine, or vLLM's metrics."""

    def fail(*_: object) -> None:
        raise ValueError("as told")

    monkeypatch.setattr(where, function, fail)
    engine = started(config())
    for _ in range(3):
        engine.observe(TREES)
        engine.run("rsd_s")
        assert "treespec_num_steps" not in shown()
    assert warnings[0].endswith(
        f"failed and is off until the next start: {without}. Answers stay the same; "
        "please report this error"
    )
    assert len({*warnings}) == len(warnings) <= 2


class Forbidden:
    """A file that cannot be opened."""

    def __init__(self, name: str) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")


OURS = {"method": "sd", "model": "nowhere", "depth": 2}


@pytest.mark.parametrize(
    ("spec", "disable_log_stats", "found"),
    [
        (None, False, 0),
        ({"method": "ngram"}, False, 0),
        (OURS, True, 0),
        (OURS, False, 1),
    ],
)
def test_unused_or_unwanted_shows_nothing(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    spec: dict[str, Any] | None,
    disable_log_stats: bool,
    found: int,
) -> None:
    """Red when we count without our methods, or against ``--disable-log-stats``."""

    def stock(self: EngineArgs) -> Any:
        return config()

    plugin.register()  # else it would be lost with the patch
    monkeypatch.setattr(EngineArgs, "create_engine_config", stock)
    monkeypatch.setattr(plugin, "refuse_arguments", lambda args: "cpu")
    monkeypatch.setattr(plugin, "refuse_models", lambda *args: None)
    monkeypatch.setattr(plugin, "refuse_short_chunks", lambda *args: None)
    monkeypatch.setattr(request_check, "warn_of_min_p", lambda model_config: None)
    plugin.register.__wrapped__()
    args = EngineArgs(model="nowhere", speculative_config=spec)
    args.disable_log_stats = disable_log_stats
    args.create_engine_config()
    assert len(list(tmp_path.iterdir())) == found
    assert registered_collector.cache_info().currsize == found
    assert ("treespec" in shown()) is False, "nothing has counted"
