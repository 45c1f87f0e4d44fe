"""What vLLM's and our counters say about draft trees, without an engine."""

import logging
import re
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import prometheus_client
import pytest
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.metrics.loggers import StatLoggerManager
from vllm.v1.metrics.prometheus import unregister_vllm_metrics
from vllm.v1.metrics.reader import Counter, get_metrics_snapshot
from vllm.v1.metrics.stats import SchedulerStats
from vllm.v1.spec_decode.metrics import (
    SpecDecodingLogging,
    SpecDecodingProm,
    SpecDecodingStats,
)

from vllm_treespec import metrics
from vllm_treespec.engine import stats as engine_stats
from vllm_treespec.engine.stats import SharedTotals, StepStats, shared_file
from vllm_treespec.metrics import TreeStatLogger, attach

# Draft nodes (root excluded) and accepted draft tokens of trees of several sizes.
TREES = [(9, 3), (9, 0), (6, 1), (4, 2)]
MAX_DRAFTS = 9
MODEL = "smol"


def config(additional: Any, api_servers: int = 1, engine: int = 0) -> Any:
    """As much of a vLLM config as is looked at."""
    return SimpleNamespace(
        additional_config=additional,
        instance_id=str(time.time_ns()),
        model_config=SimpleNamespace(served_model_name=MODEL),
        parallel_config=SimpleNamespace(
            rank=0, data_parallel_index=engine, _api_process_count=api_servers
        ),
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
    unregister_vllm_metrics()
    yield
    unregister_vllm_metrics()


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The lines that our logger prints."""
    found: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: found.append(record.getMessage())  # type: ignore[method-assign]
    monkeypatch.setattr(metrics.logger, "handlers", [handler])
    monkeypatch.setattr(metrics.logger, "propagate", False)
    metrics.logger.setLevel(logging.INFO)
    return found


def started(vllm_config: Any, engines: list[int] | None = None) -> TreeStatLogger:
    """Return our stat logger as vLLM starts it."""
    stat_logger = TreeStatLogger(vllm_config, engines or [0])
    stat_logger.log_engine_initialized()
    return stat_logger


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


def test_ours_from_scheduler_and_worker() -> None:
    """Red when a node is counted twice, a root is called wasted, or a step is lost."""
    vllm_config = config({"treespec": {}})
    worker = StepStats()
    worker.share(vllm_config)
    worker.mode("before")
    stat_logger = started(vllm_config)
    for mode, trees in (("wide", TREES[:2]), ("chain", TREES[2:]), ("plain", [])):
        worker.mode(mode)
        worker.spent("draft", 0.25)
        worker.reset()
        stat_logger.record(scheduler_stats(trees), None)
    stat_logger.record(None, None)
    assert value("treespec_num_nodes_verified") == 28 + len(TREES)
    assert value("treespec_num_nodes_wasted") == 28 - 6
    accepted = [
        value("treespec_num_accepted_tokens_per_depth", depth=str(depth))
        for depth in range(1, 5)
    ]
    assert accepted == [3, 2, 1, None]
    assert value("treespec_stage_seconds", stage="draft") == pytest.approx(0.75)
    assert value("treespec_stage_seconds", stage="commit") == 0
    for mode in ("before", "wide", "chain", "plain"):
        assert value("treespec_num_steps", mode=mode) == 1


def test_compression_ratio(lines: list[str]) -> None:
    """Red when the tokens of beams, or the nodes they became, are not counted."""
    vllm_config = config({"treespec": {}})
    worker = StepStats()
    worker.share(vllm_config)
    stat_logger = started(vllm_config)
    assert value("treespec_num_beam_tokens") == value("treespec_num_beam_nodes") == 0
    for num_tokens, num_nodes in ((32, 21), (16, 9)):
        worker.merged(num_tokens, num_nodes)
        stat_logger.record(scheduler_stats([]), None)
    assert value("treespec_num_beam_tokens") == worker.as_dict()["beam_tokens"] == 48
    assert value("treespec_num_beam_nodes") == worker.as_dict()["beam_nodes"] == 30
    stat_logger.log()
    assert lines == ["Engine 000: TreeSpec metrics: Compression ratio: 1.60"]


def test_line_of_each_interval(lines: list[str]) -> None:
    """Red when the line repeats an earlier interval, or an idle engine prints one."""
    vllm_config = config({"treespec": {}})
    worker = StepStats()
    worker.share(vllm_config)
    stat_logger = started(vllm_config)
    for trees in (TREES[:2], TREES[2:]):
        worker.spent("forward", 0.03)
        worker.spent("draft", 0.01)
        worker.mode("rsd_s")
        stat_logger.record(scheduler_stats(trees), None)
    stat_logger.log()
    assert lines.pop() == (
        "Engine 000: TreeSpec metrics: Accepted by depth: 0.750, 0.500, 0.250, "
        "Nodes verified: 32, Nodes wasted: 22 (68.8%), Steps: rsd_s 2, "
        "Milliseconds per step: forward 30.00, draft 10.00"
    )
    stat_logger.log()
    worker.spent("forward", 0.02)
    worker.mode("plain")
    stat_logger.record(scheduler_stats([]), None)
    stat_logger.log()
    assert lines == [
        "Engine 000: TreeSpec metrics: Steps: plain 1, "
        "Milliseconds per step: forward 20.00"
    ]


@pytest.mark.parametrize("additional", [{}, {"other": 1}, SimpleNamespace()])
def test_silent_without_trees(additional: Any, lines: list[str]) -> None:
    """Red when an engine that drafts otherwise, or not at all, gets our metrics."""
    stat_logger = started(config(additional), [0, 1])
    stat_logger.record(scheduler_stats(TREES), None)
    stat_logger.record(None, None, engine_idx=1)
    stat_logger.log()
    assert lines == []
    assert "treespec" not in prometheus_client.generate_latest().decode()


def test_several_engines(lines: list[str]) -> None:
    """Red when engines of one front-end are mixed up."""
    vllm_config = config({"treespec": {}})
    workers = [StepStats(), StepStats()]
    for engine, worker in enumerate(workers):
        vllm_config.parallel_config.data_parallel_index = engine
        worker.share(vllm_config)
    workers[1].mode("chain")
    workers[1].spent("draft", 0.01)
    stat_logger = started(vllm_config, [0, 1])
    stat_logger.record(scheduler_stats(TREES[:1]), None, engine_idx=1)
    stat_logger.log()
    assert [line.split(":")[0] for line in lines] == ["Engine 001"]
    assert "Steps: chain 1, Milliseconds per step: draft 10.00" in lines[0]
    assert value("treespec_num_nodes_verified", engine="1") == 10
    assert value("treespec_num_nodes_verified") == 0


def test_engine_out_of_reach(lines: list[str]) -> None:
    """Red when missing seconds pass for none, or cost us the other counters."""
    stat_logger = started(config({"treespec": {}}, api_servers=2))
    assert "no seconds per stage" in lines.pop()
    stat_logger.record(scheduler_stats(TREES), None)
    stat_logger.log()
    assert value("treespec_num_nodes_verified") == 32
    assert lines == []


def test_shared_file_goes_away(tmp_path: Path) -> None:
    """Red when engines leave files behind, read or not."""
    read, unread = config({"treespec": {}}), config({"treespec": {}}, engine=1)
    workers = [StepStats(), StepStats()]
    for worker, vllm_config in zip(workers, (read, unread), strict=True):
        worker.share(vllm_config)
    started(read)
    assert list(tmp_path.iterdir()) == [shared_file(unread, 1)]
    assert shared_file(unread, 1).stat().st_mode & 0o777 == 0o600
    workers.clear()
    del worker
    assert list(tmp_path.iterdir()) == []


def test_only_rank_0_shares(tmp_path: Path) -> None:
    """Red when every worker of an engine counts the same step."""
    vllm_config = config({"treespec": {}})
    vllm_config.parallel_config.rank = 1
    worker = StepStats()
    worker.share(vllm_config)
    worker.mode("rsd_s")
    assert list(tmp_path.iterdir()) == []
    assert worker.as_dict()["modes"] == {"rsd_s": 1}


def test_attached_offline() -> None:
    """Red when ``LLM.get_metrics`` stops showing ours, or a later engine's fail."""
    for _ in range(2):
        vllm_config = config({"treespec": {}})
        unregister_vllm_metrics()  # as every engine's own metrics do first
        worker = StepStats()
        worker.share(vllm_config)
        manager = object.__new__(StatLoggerManager)
        manager.engine_indexes, manager.stat_loggers = [0], []
        engine = SimpleNamespace(vllm_config=vllm_config, logger_manager=manager)
        attach(SimpleNamespace(llm_engine=engine))
        manager.record(scheduler_stats(TREES), None)
        shown = {m.name: m.value for m in get_metrics_snapshot() if type(m) is Counter}
        assert shown["vllm:treespec_num_nodes_wasted"] == 22
    silent = SimpleNamespace(llm_engine=SimpleNamespace(logger_manager=None))
    with pytest.raises(ValueError, match="disable_log_stats=False"):
        attach(silent)


def test_step_costs_microseconds(tmp_path: Path) -> None:
    """Red when counting takes a share of a step that one could measure."""
    vllm_config = config({"treespec": {}})
    worker = StepStats()
    worker.share(vllm_config)
    start = time.process_time()
    for _ in range(1000):
        for stage in metrics.ALL_STAGES:
            worker.spent(stage, 0.001)
        worker.mode("rsd_s")
    assert time.process_time() - start < 1000 * 50e-6


def test_names_are_documented() -> None:
    """Red when docs/metrics.md misses a counter or names one that is gone."""
    text = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text()
    metrics.TreeCounters(MODEL, [0])
    ours = {
        metric.name
        for metric in prometheus_client.REGISTRY.collect()
        if metric.name.startswith(metrics.PREFIX)
    }
    assert {
        n.removesuffix("_total") for n in re.findall(r"vllm:treespec_\w+", text)
    } == ours


def test_totals_by_name(tmp_path: Path) -> None:
    """Red when a reader mixes up rows or misses one that came later."""
    writer = SharedTotals.create(tmp_path / "totals")
    reader = SharedTotals(tmp_path / "totals")
    assert reader.read() == {}
    writer.add("stage:draft", 0.5)
    writer.add("mode:w4", 1)
    writer.add("stage:draft", 0.25)
    assert reader.read() == {"stage:draft": 0.75, "mode:w4": 1}
    with pytest.raises(FileExistsError):
        SharedTotals.create(tmp_path / "totals")
