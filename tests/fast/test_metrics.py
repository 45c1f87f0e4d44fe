"""What vLLM's and our counters say about draft trees, without an engine."""

import errno
import logging
import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import prometheus_client
import pytest
from prometheus_client.parser import text_string_to_metric_families
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.metrics.loggers import load_stat_logger_plugin_factories
from vllm.v1.metrics.prometheus import (
    get_prometheus_registry,
    unregister_vllm_metrics,
)
from vllm.v1.metrics.reader import Counter, get_metrics_snapshot
from vllm.v1.metrics.stats import SchedulerStats
from vllm.v1.spec_decode.metrics import (
    SpecDecodingLogging,
    SpecDecodingProm,
    SpecDecodingStats,
)

from vllm_treespec import metrics, plugin
from vllm_treespec.core import stats as engine_stats
from vllm_treespec.core.stats import StepStats
from vllm_treespec.metrics import registered_collector, show_counters

# Draft nodes (root excluded) and accepted draft tokens of trees of several sizes.
TREES = [(9, 3), (9, 0), (6, 1), (4, 2)]
MAX_DRAFTS = 9
MODEL = "smol"


def config() -> Any:
    """As much of a vLLM config as is looked at."""
    return SimpleNamespace(
        instance_id=str(time.time_ns()),
        model_config=SimpleNamespace(served_model_name=MODEL),
        parallel_config=SimpleNamespace(rank=0, data_parallel_index=0),
    )


def scheduler_stats(trees: list[tuple[int, int]]) -> SchedulerStats:
    """What the scheduler reports after a step that verified these trees."""
    scheduler: Any = SimpleNamespace(log_stats=True, num_spec_tokens=MAX_DRAFTS)
    stats: SpecDecodingStats | None = None
    for num_drafts, num_accepted in trees:
        stats = Scheduler.make_spec_decoding_stats(
            scheduler, stats, num_drafts, num_accepted, None, "request"
        )
    return SchedulerStats(spec_decoding_stats=stats)


def value(name: str, **labels: str) -> float | None:
    """A counter of engine 0, None when it is not exported."""
    return prometheus_client.REGISTRY.get_sample_value(
        f"vllm:{name}_total", {"model_name": MODEL, "engine": "0", **labels}
    )


@pytest.fixture(autouse=True)
def clean(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Give each test its own metrics and its own shared memory."""
    monkeypatch.setattr(engine_stats, "SHARED_FOLDER", tmp_path)
    monkeypatch.delenv("PROMETHEUS_MULTIPROC_DIR", raising=False)
    unregister_vllm_metrics()
    yield
    unregister_vllm_metrics()
    prometheus_client.REGISTRY.unregister(registered_collector())
    registered_collector.cache_clear()


@pytest.fixture
def warnings(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The lines that we print."""
    found: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: found.append(record.getMessage())  # type: ignore[method-assign]
    monkeypatch.setattr(metrics.logger, "handlers", [handler])
    monkeypatch.setattr(metrics.logger, "propagate", False)
    return found


def started(vllm_config: Any) -> StepStats:
    """Start an engine: the front-end first, then the worker, whose totals these are."""
    show_counters(vllm_config)
    worker = StepStats()
    worker.share(vllm_config)
    return worker


def observe(worker: StepStats, trees: list[tuple[int, int]]) -> None:
    """Let a worker count a step that verified these trees."""
    worker.observe([drafts + 1 for drafts, _ in trees], [n for _, n in trees])


def shown() -> str:
    """What ``/metrics`` answers."""
    return prometheus_client.generate_latest().decode()


def test_vllm_counters_on_trees() -> None:
    """Red when vLLM counts other things than trees, drafted nodes and depths."""
    prom = SpecDecodingProm(
        SimpleNamespace(num_speculative_tokens=MAX_DRAFTS),
        ["model_name", "engine"],
        {0: [MODEL, "0"]},
    )
    stats = scheduler_stats(TREES).spec_decoding_stats
    assert stats is not None
    prom.observe(stats)
    assert value("spec_decode_num_drafts") == len(TREES)
    assert value("spec_decode_num_draft_tokens") == 9 + 9 + 6 + 4
    assert value("spec_decode_num_accepted_tokens") == 3 + 0 + 1 + 2
    depths = [
        value("spec_decode_num_accepted_tokens_per_pos", position=str(position))
        for position in range(MAX_DRAFTS)
    ]
    # One node of each depth is accepted, so a position is a depth; a series stands
    # for every draft token, though no tree is as deep as it has nodes.
    assert depths == [3, 2, 1, 0, 0, 0, 0, 0, 0]


def test_vllm_line_on_trees() -> None:
    """Red when the acceptance length loses the bonus token, or rates their divisor."""
    logging_stats = SpecDecodingLogging()
    for tree in TREES:
        stats = scheduler_stats([tree]).spec_decoding_stats
        assert stats is not None
        logging_stats.observe(stats)
    found: list[str] = []
    logging_stats.log(lambda text, *values: found.append(text % values))
    (line,) = found
    emitted_per_tree = sum(accepted + 1 for _, accepted in TREES) / len(TREES)
    assert f"Mean acceptance length: {emitted_per_tree:.2f}," in line
    assert "Accepted: 6 tokens, Drafted: 28 tokens" in line
    assert "Per-position acceptance rate: 0.750, 0.500, 0.250, 0.000, " in line
    assert f"Avg Draft acceptance rate: {100 * 6 / 28:.1f}%" in line


def test_ours_from_the_worker() -> None:
    """Red when a node is counted twice, a root is called wasted, or a step is lost."""
    worker = started(config())
    assert value("treespec_num_nodes_verified") == 0
    assert value("treespec_stage_seconds", stage="draft") == 0
    for mode, trees in (("wide", TREES[:2]), ("chain", TREES[2:]), ("plain", [])):
        worker.mode(mode)
        worker.spent("forward", 0.25)
        observe(worker, trees)
    worker.merged(12, 9)
    assert value("treespec_num_nodes_verified") == 28 + 4
    assert value("treespec_num_nodes_wasted") == 28 - 6
    depths = [
        value("treespec_num_accepted_tokens_per_depth", depth=str(depth))
        for depth in range(1, 5)
    ]
    assert depths == [3, 2, 1, None]
    for mode in ("wide", "chain", "plain"):
        assert value("treespec_num_steps", mode=mode) == 1
    assert value("treespec_stage_seconds", stage="forward") == 0.75
    assert value("treespec_num_beam_tokens") == 12
    assert value("treespec_num_beam_nodes") == 9


def test_counters_survive_a_reset() -> None:
    """Red when ``treespec_stats(reset=True)`` makes a counter go down."""
    worker = started(config())
    worker.mode("plain")
    worker.reset()
    worker.mode("plain")
    assert worker.as_dict()["modes"] == {"plain": 1}
    assert value("treespec_num_steps", mode="plain") == 2


def test_names_of_any_length_and_number() -> None:
    """Red when names are cut and collide, or when there are too many of them."""
    worker = started(config())
    long = "rsd_s " + "x" * 80
    names = [f"{long} {number}" for number in range(150)]
    odd = ['quote " and \\', "line\nbreak", "Bäume 树", ""]
    for times, name in enumerate([*names, *odd], 1):
        for _ in range(times):
            worker.mode(name)
    for times, name in enumerate([*names, *odd], 1):
        assert value("treespec_num_steps", mode=name) == times, name
    samples = text_string_to_metric_families(shown())
    by_mode = {
        sample.labels["mode"]: sample.value
        for family in samples
        if family.name == "vllm:treespec_num_steps"
        for sample in family.samples
    }
    assert by_mode == {n: t for t, n in enumerate([*names, *odd], 1)}


def test_more_counters_than_the_file_had_room_for() -> None:
    """Red when a file that is full stops the worker."""
    worker = started(config())
    names = [f"{number} " + "x" * 2000 for number in range(300)]
    for name in names:
        worker.mode(name)
    assert [value("treespec_num_steps", mode=name) for name in names] == [1] * 300


def test_counters_never_go_down_while_they_are_read() -> None:
    """Red when a reader sees half a number."""
    worker = started(config())
    stop = threading.Event()

    def count() -> None:
        while not stop.is_set():
            worker.spent("forward", 0.1)
            worker.mode("plain")

    thread = threading.Thread(target=count)
    thread.start()
    seen = [value("treespec_stage_seconds", stage="forward") or 0 for _ in range(300)]
    stop.set()
    thread.join()
    assert seen == sorted(seen)
    assert seen[-1] > seen[0]


def test_a_later_engine_replaces_the_earlier() -> None:
    """Red when two engines of one process share series, or the later one has none."""
    first = started(config())
    first.mode("wide")
    unregister_vllm_metrics()  # as every engine's own metrics do first
    second = started(config())
    first.mode("wide")
    second.mode("chain")
    assert value("treespec_num_steps", mode="wide") is None
    assert value("treespec_num_steps", mode="chain") == 1
    found = {m.name for m in get_metrics_snapshot() if type(m) is Counter}
    assert "vllm:treespec_num_nodes_wasted" in found


def test_several_api_servers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, warnings: list[str]
) -> None:
    """Red when servers that gather their metrics in a folder lose ours."""
    folder = tmp_path / "prometheus"
    folder.mkdir()
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(folder))
    started_one = config()
    worker = started(started_one)
    # The other servers' configs name engines that nobody starts.
    show_counters(config())
    worker.mode("rsd_s")
    text = prometheus_client.generate_latest(get_prometheus_registry()).decode()
    assert (
        'treespec_num_steps_total{engine="0",mode="rsd_s",model_name="smol"} 1.0'
        in text
    )
    assert "vllm:treespec_num_nodes_verified_total" in text
    assert warnings == []
    assert [path.name for path in tmp_path.iterdir()] == ["prometheus"]


@pytest.mark.parametrize("end", ["worker first", "front-end first", "no worker"])
def test_no_file_stays(tmp_path: Path, end: str) -> None:
    """Red when engines leave files behind, however their processes end."""
    vllm_config = config()
    show_counters(vllm_config)
    (file,) = tmp_path.iterdir()
    assert file.stat().st_mode & 0o777 == 0o600
    if end == "no worker":
        registered_collector().follow(config())
        (other,) = tmp_path.iterdir()
        assert other != file
        # As at the end of the process.
        remove = registered_collector()._remove
        assert remove is not None
        remove()
    else:
        worker = StepStats()
        worker.share(vllm_config)
        # Without a name it goes when nobody has it open, also after a SIGKILL.
        assert list(tmp_path.iterdir()) == []
        if end == "front-end first":
            registered_collector()._file.close()  # type: ignore[union-attr]
            worker.mode("plain")
        else:
            del worker
    assert list(tmp_path.iterdir()) == []


def test_no_statistics_no_file(tmp_path: Path) -> None:
    """Red when an engine without statistics counts for nobody."""
    worker = StepStats()
    worker.share(config())
    worker.mode("rsd_s")
    assert list(tmp_path.iterdir()) == []
    assert worker.as_dict()["modes"] == {"rsd_s": 1}


def test_only_rank_0_shares() -> None:
    """Red when every worker of an engine counts the same step."""
    vllm_config = config()
    show_counters(vllm_config)
    for rank in (1, 0):
        vllm_config.parallel_config.rank = rank
        worker = StepStats()
        worker.share(vllm_config)
        worker.mode("rsd_s")
    assert value("treespec_num_steps", mode="rsd_s") == 1


def test_serving_goes_on_without_metrics(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, warnings: list[str]
) -> None:
    """Red when a full or forbidden shared memory stops an engine."""
    vllm_config = config()
    show_counters(vllm_config)
    with monkeypatch.context() as patch:

        def full(*args: Any) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        patch.setattr(engine_stats.os, "posix_fallocate", full)
        show_counters(config())
        patch.setattr(engine_stats, "SHARED_FOLDER", tmp_path / "nowhere")
        started(config()).mode("rsd_s")
    assert ["No space left" in line for line in warnings] == [True, False]
    assert all(line.startswith("No metrics of draft trees: ") for line in warnings)
    assert "treespec" not in shown()
    assert list(tmp_path.iterdir()) == []
    # A worker that may not open the file.
    monkeypatch.setattr(engine_stats, "MmapedDict", Forbidden)
    worker = started(config())
    worker.mode("rsd_s")
    observe(worker, TREES)
    assert warnings[2] == "No metrics of draft trees: [Errno 13] Permission denied"


class Forbidden:
    """A file that cannot be opened."""

    def __init__(self, name: str) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")


def test_package_keeps_no_statistics_on() -> None:
    """Red when vLLM finds a stat logger of ours.

    For any it finds, it keeps statistics in every server, ``--disable-log-stats`` or
    not, whether our methods are used or not.
    """
    modules = {f.__module__ for f in load_stat_logger_plugin_factories()}
    assert not {name for name in modules if name.startswith("vllm_treespec")}


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

    monkeypatch.setattr(EngineArgs, "create_engine_config", stock)
    monkeypatch.setattr(plugin, "refuse_arguments", lambda args: "cpu")
    monkeypatch.setattr(plugin, "refuse_models", lambda *args: None)
    monkeypatch.setattr(plugin, "refuse_short_chunks", lambda *args: None)
    plugin.register.__wrapped__()
    args = EngineArgs(model="nowhere", speculative_config=spec)
    args.disable_log_stats = disable_log_stats
    args.create_engine_config()
    assert len(list(tmp_path.iterdir())) == found
    assert registered_collector.cache_info().currsize == found
    assert ("treespec" in shown()) is False, "nothing has counted"


def test_step_costs_microseconds() -> None:
    """Red when counting takes a share of a step that one could measure."""
    worker = started(config())
    start = time.process_time()
    for _ in range(1000):
        for stage in (*engine_stats.STAGES, engine_stats.DRAFT_FORWARD):
            worker.spent(stage, 0.001)
        worker.mode("rsd_s")
        observe(worker, TREES)
    assert time.process_time() - start < 1000 * 100e-6


def test_names_are_documented() -> None:
    """Red when docs/metrics.md misses a counter or names one that is gone."""
    text = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text()
    ours = {metrics.PREFIX + name for name in engine_stats.COUNTERS}
    assert {
        n.removesuffix("_total") for n in re.findall(r"vllm:treespec_\w+", text)
    } == ours
    assert {family.name for family in registered_collector().describe()} == ours
