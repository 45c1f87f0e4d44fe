"""What vLLM's and our counters say about draft trees, without an engine."""

import errno
import logging
import os
import pickle
import re
import subprocess
import sys
import tempfile
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
from vllm.v1.outputs import DraftTokenIds
from vllm.v1.spec_decode.metrics import (
    SpecDecodingLogging,
    SpecDecodingProm,
    SpecDecodingStats,
)

from vllm_treespec import metrics, plugin
from vllm_treespec.core.stats import DRAFT_FORWARD, STAGES, StepCounts, StepStats
from vllm_treespec.engine.scheduler import TreeDraftTokenIds, TreeScheduler
from vllm_treespec.engine.v1.drafting import DraftingMixin
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
    """Give each test its own metrics and its own temporary folder."""

    def make(self: Scheduler, vllm_config: Any, log_stats: bool) -> None:
        self.vllm_config, self.log_stats = vllm_config, log_stats
        self.requests = {}

    monkeypatch.setattr(Scheduler, "__init__", make)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
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


class Engine:
    """What counts in an engine: a worker and its scheduler, a process each."""

    def __init__(self, vllm_config: Any, log_stats: bool = True) -> None:
        self.worker = StepStats()
        self.scheduler = TreeScheduler(vllm_config, log_stats=log_stats)

    def end_step(self) -> None:
        """Hand over what was counted, as at the end of each step."""
        drafts = TreeDraftTokenIds([], [], {}, self.worker.hand_over())
        self.scheduler.update_draft_token_ids(pickle.loads(pickle.dumps(drafts)))

    def observe(self, trees: list[tuple[int, int]]) -> None:
        """Count the trees of a step."""
        self.worker.observe([drafts + 1 for drafts, _ in trees], [n for _, n in trees])

    def run(self, mode: str) -> None:
        """Run a step that counts its mode only."""
        self.worker.mode(mode)
        self.end_step()


def started(vllm_config: Any) -> Engine:
    """Start an engine: the front-end first, then the rest."""
    show_counters(vllm_config)
    return Engine(vllm_config)


def shown() -> str:
    """What ``/metrics`` answers."""
    return prometheus_client.generate_latest().decode()


def ours() -> set[str]:
    """What ``/metrics`` answers about draft trees."""
    return {line for line in shown().splitlines() if "vllm:treespec" in line}


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
    engine = started(config())
    assert value("treespec_num_nodes_verified") == 0
    assert value("treespec_stage_seconds", stage="draft") == 0
    for mode, trees in (("wide", TREES[:2]), ("chain", TREES[2:]), ("plain", [])):
        engine.worker.mode(mode)
        engine.worker.spent("forward", 0.25)
        engine.observe(trees)
        engine.end_step()
    engine.worker.merged(12, 9)
    engine.end_step()
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


def test_what_is_handed_over_counts_once() -> None:
    """Red when a record is counted again, or two steps' records differ from one."""
    engine = started(config())
    engine.run("wide")
    engine.end_step()
    engine.end_step()
    assert value("treespec_num_steps", mode="wide") == 1
    assert engine.worker.as_dict()["modes"] == {"wide": 1}
    for drafts, accepted in TREES:
        engine.observe([(drafts, accepted)])
        engine.end_step()
    one_by_one = ours()
    together = started(config())
    together.worker.mode("wide")
    together.observe(TREES)
    together.end_step()
    assert ours() == one_by_one


def test_record_is_plain_numbers() -> None:
    """Red when a record cannot travel between processes, or changes on the way."""
    worker = StepStats()
    worker.mode("wide")
    worker.spent("forward", 0.25)
    worker.observe([5, 7, 7], [0, 2, 1])
    worker.merged(12, 9)
    totals = worker.as_dict()
    counts = worker.hand_over()
    assert pickle.loads(pickle.dumps(counts)) == counts
    assert (counts.steps, counts.trees, counts.nodes) == (1, 3, 19)
    assert counts.seconds == {"forward": 0.25}
    assert counts.accepted == {0: 1, 2: 1, 1: 1}
    worker.mode("wide")
    assert counts.modes == {"wide": 1}, "the worker still writes to it"
    assert totals["node_counts"] == {5: 1, 7: 2}


class StockRunner:
    """As much of vLLM's runner as hands over drafts."""

    drafts: DraftTokenIds | None = None

    def take_draft_token_ids(self) -> DraftTokenIds | None:
        """The drafts of this step."""
        return self.drafts


class Runner(DraftingMixin, StockRunner):
    """Our runner, without a model."""

    def __init__(self) -> None:
        self.stats = StepStats()
        self.proposal = None


def test_every_step_is_handed_over() -> None:
    """Red when steps without trees or without drafts are missing from the counters."""
    runner = Runner()
    runner.stats.mode("plain")
    assert runner.take_draft_token_ids() is None
    runner.stats.mode("plain")
    runner.drafts = DraftTokenIds(["a", "b"], [[], []])
    found = runner.take_draft_token_ids()
    assert isinstance(found, TreeDraftTokenIds)
    assert (found.req_ids, found.draft_token_ids) == (["a", "b"], [[], []])
    assert found.parents == {}
    assert found.counts.modes == {"plain": 2}
    assert runner.take_draft_token_ids().counts == StepCounts()


def test_counters_survive_a_reset() -> None:
    """Red when ``treespec_stats(reset=True)`` makes a counter go down, or loses one."""
    engine = started(config())
    engine.run("plain")
    engine.worker.mode("plain")
    engine.worker.reset()
    engine.worker.mode("plain")
    engine.end_step()
    assert engine.worker.as_dict()["modes"] == {"plain": 1}
    assert value("treespec_num_steps", mode="plain") == 3


def test_names_of_any_length_and_number() -> None:
    """Red when names are cut and collide, or when there are too many of them."""
    engine = started(config())
    long = "rsd_s " + "x" * 80
    names = [f"{long} {number}" for number in range(150)]
    odd = ['quote " and \\', "line\nbreak", "Bäume 树", ""]
    for times, name in enumerate([*names, *odd], 1):
        for _ in range(times):
            engine.worker.mode(name)
        engine.end_step()
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
    """Red when a file that is full stops the scheduler."""
    engine = started(config())
    names = [f"{number} " + "x" * 2000 for number in range(300)]
    for name in names:
        engine.run(name)
    assert [value("treespec_num_steps", mode=name) for name in names] == [1] * 300


def test_counters_never_go_down_while_they_are_read() -> None:
    """Red when a reader sees half a number."""
    engine = started(config())
    stop = threading.Event()

    def count() -> None:
        while not stop.is_set():
            engine.worker.spent("forward", 0.1)
            engine.run("plain")

    thread = threading.Thread(target=count)
    thread.start()
    seen = [0.0]
    deadline = time.monotonic() + 60
    while len(set(seen)) < 30 and time.monotonic() < deadline:
        seen.append(value("treespec_stage_seconds", stage="forward") or 0)
    stop.set()
    thread.join()
    assert seen == sorted(seen)
    assert len(set(seen)) == 30, "nothing was counted meanwhile"


def test_a_later_engine_replaces_the_earlier() -> None:
    """Red when two engines of one process share series, or the later one has none."""
    first = started(config())
    first.run("wide")
    unregister_vllm_metrics()  # as every engine's own metrics do first
    second = started(config())
    first.run("wide")
    second.run("chain")
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


@pytest.mark.parametrize("gathered", [False, True])
def test_scheduler_in_another_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gathered: bool
) -> None:
    """Red when the front-end misses what another process counts, or a file stays."""
    folder = tmp_path / "prometheus"
    folder.mkdir()
    if gathered:
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
        pickle.dump(vllm_config, other.stdin)
        other.stdin.flush()
        assert other.stdout.readline() == b"ready\n"
        assert [path.name for path in tmp_path.iterdir()] == ["prometheus"]
        for times in (1, 2):
            worker.mode("rsd_s")
            pickle.dump(worker.hand_over(), other.stdin)
            other.stdin.flush()
            assert other.stdout.readline() == b"added\n"
            found = get_prometheus_registry().get_sample_value(
                "vllm:treespec_num_steps_total",
                {"model_name": MODEL, "engine": "0", "mode": "rsd_s"},
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
        registered_collector().follow(config())
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
            registered_collector()._file.close()  # type: ignore[union-attr]
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

    plugin.register()  # else it would be lost with the patch
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
    engine = started(config())
    start = time.process_time()
    for _ in range(1000):
        for stage in (*STAGES, DRAFT_FORWARD):
            engine.worker.spent(stage, 0.001)
        engine.observe(TREES)
        engine.run("rsd_s")
    assert time.process_time() - start < 1000 * 100e-6


def test_names_are_documented() -> None:
    """Red when docs/metrics.md misses a counter or names one that is gone."""
    text = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text()
    ours = {metrics.PREFIX + name for name in metrics.COUNTERS}
    assert {
        n.removesuffix("_total") for n in re.findall(r"vllm:treespec_\w+", text)
    } == ours
    assert {family.name for family in registered_collector().describe()} == ours
