"""What vLLM's and our counters say about draft trees, without an engine."""

import pickle
import re
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import prometheus_client
import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families
from torch import Tensor
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.metrics.loggers import load_stat_logger_plugin_factories
from vllm.v1.metrics.prometheus import unregister_vllm_metrics
from vllm.v1.metrics.reader import Counter, get_metrics_snapshot
from vllm.v1.metrics.stats import SchedulerStats
from vllm.v1.outputs import DraftTokenIds
from vllm.v1.spec_decode.metrics import (
    SpecDecodingLogging,
    SpecDecodingProm,
    SpecDecodingStats,
)

from tests.fast.counting import (
    MAX_DRAFTS,
    TREES,
    config,
    ours,
    own_metrics,
    shown,
    started,
    value,
)
from tests.fast.small_engine import MODEL_NAME, make_scheduler
from tests.fast.toy_workloads import make_engine
from vllm_treespec import metrics
from vllm_treespec.batch.stats import DRAFT_FORWARD, STAGES, StepCounts, StepStats
from vllm_treespec.engine.scheduler import TreeDraftTokenIds
from vllm_treespec.engine.v1.runner import TreeRunnerMixin
from vllm_treespec.layouts.base import LayoutLimits, TreeLayout
from vllm_treespec.metrics import registered_collector
from vllm_treespec.testing.fake_scheduler import Habits


@pytest.fixture(autouse=True)
def clean(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Give each test its own metrics and its own temporary folder."""
    yield from own_metrics(tmp_path, monkeypatch)


def scheduler_stats(trees: list[tuple[int, int]]) -> SchedulerStats:
    """What the scheduler reports after a step that verified these trees."""
    scheduler = make_scheduler(config(), log_stats=True)
    stats: SpecDecodingStats | None = None
    for num_drafts, num_accepted in trees:
        stats = scheduler.make_spec_decoding_stats(
            stats, num_drafts, num_accepted, None, "request"
        )
    return SchedulerStats(spec_decoding_stats=stats)


def test_vllm_counters_on_trees() -> None:
    """Red when vLLM counts other things than trees, drafted nodes and depths."""
    prom = SpecDecodingProm(
        config().speculative_config,
        ["model_name", "engine"],
        {0: [MODEL_NAME, "0"]},
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
        engine.worker.count_step(mode)
        engine.worker.add_seconds("forward", 0.25)
        engine.observe(trees)
        engine.end_step()
    engine.worker.count_beams(12, 9)
    engine.worker.count_leftovers(5, 2)
    for _ in range(2):
        engine.worker.count_sources(np.array([7, 9]), np.array([3, 4]))
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
    assert value("treespec_num_leftover_nodes") == 5
    assert value("treespec_num_leftover_nodes_accepted") == 2
    assert value("treespec_num_source_nodes", source="index") == 14
    assert value("treespec_num_source_nodes_accepted", source="model") == 8


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
    together.worker.count_step("wide")
    together.observe(TREES)
    together.end_step()
    assert ours() == one_by_one


def test_record_is_plain_numbers() -> None:
    """Red when a record cannot travel between processes, or changes on the way."""
    worker = StepStats()
    worker.count_step("wide")
    worker.add_seconds("forward", 0.25)
    worker.count_trees([5, 7, 7], [0, 2, 1])
    worker.count_beams(12, 9)
    totals = worker.as_dict()
    counts = worker.hand_over()
    assert pickle.loads(pickle.dumps(counts)) == counts
    assert (counts.steps, counts.trees, counts.nodes) == (1, 3, 19)
    assert counts.seconds == {"forward": 0.25}
    assert counts.accepted == {0: 1, 2: 1, 1: 1}
    worker.count_step("wide")
    assert counts.modes == {"wide": 1}, "the worker still writes to it"
    assert totals["node_counts"] == {5: 1, 7: 2}


class StockRunner:
    """As much of vLLM's runner as hands over drafts."""

    drafts: DraftTokenIds | None = None

    def take_draft_token_ids(self) -> DraftTokenIds | None:
        """The drafts of this step."""
        return self.drafts


class Runner(TreeRunnerMixin, StockRunner):
    """Our runner, without a model."""

    def __init__(self) -> None:
        self.decoder = make_engine("rsd_s", Habits()).decoder
        self._step_end = None
        self._aux_layers = ()

    def make_layout(self, limits: LayoutLimits) -> TreeLayout:
        raise NotImplementedError

    def connect_attention(self, kv_caches: dict[str, Tensor]) -> None:
        raise NotImplementedError


def test_every_step_is_handed_over() -> None:
    """Red when steps without trees or without drafts are missing from the counters."""
    runner = Runner()
    runner.decoder.stats.count_step("plain")
    assert runner.take_draft_token_ids() is None
    runner.decoder.stats.count_step("plain")
    runner.drafts = DraftTokenIds(["a", "b"], [[], []])
    found = runner.take_draft_token_ids()
    assert isinstance(found, TreeDraftTokenIds)
    assert (found.req_ids, found.draft_token_ids) == (["a", "b"], [[], []])
    assert found.parents == {}
    assert found.counts.modes == {"plain": 2}
    found = runner.take_draft_token_ids()
    assert isinstance(found, TreeDraftTokenIds)
    assert found.counts == StepCounts()


def test_trees_are_drawn_when_they_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Red when a step's tokens wait for the next trees, or are cut before these."""
    runner, drawn = Runner(), list[list[list[int]]]()
    monkeypatch.setattr(
        runner.decoder, "rests", lambda num_emitted: not any(num_emitted)
    )
    monkeypatch.setattr(runner, "_propose", lambda tokens, _: drawn.append(tokens))
    steps: list[list[list[int]]] = [[[5], [6, 7]], [[], []]]
    for tokens in steps:
        states = torch.zeros(3, 4)
        drafts = runner.propose_draft_token_ids(
            SchedulerOutput.make_empty(), tokens, None, states, states, None
        )
        assert (drafts, drawn) == ([[], []], [])
        runner.drafts = DraftTokenIds(["a", "b"], drafts)
        emitted = [[*row] for row in tokens]
        # The scheduler does this to a request that has ended.
        tokens[1].clear()
        runner.take_draft_token_ids()
        assert drawn == ([emitted] if any(emitted) else [])
        drawn.clear()


def test_counters_survive_a_reset() -> None:
    """Red when ``treespec_stats(reset=True)`` makes a counter go down, or loses one."""
    engine = started(config())
    engine.run("plain")
    engine.worker.count_step("plain")
    engine.worker.reset()
    engine.worker.count_step("plain")
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
            engine.worker.count_step(name)
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
            engine.worker.add_seconds("forward", 0.1)
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


def test_package_keeps_no_statistics_on() -> None:
    """Red when vLLM finds a stat logger of ours.

    For any it finds, it keeps statistics in every server, ``--disable-log-stats`` or
    not, whether our methods are used or not.
    """
    modules = {f.__module__ for f in load_stat_logger_plugin_factories()}
    assert not {name for name in modules if name.startswith("vllm_treespec")}


def test_step_costs_microseconds() -> None:
    """Red when counting takes a share of a step that one could measure."""
    engine = started(config())
    start = time.process_time()
    for _ in range(1000):
        for stage in (*STAGES, DRAFT_FORWARD):
            engine.worker.add_seconds(stage, 0.001)
        engine.observe(TREES)
        engine.run("rsd_s")
    assert time.process_time() - start < 1000 * 100e-6


def trees(count: int, drafts: int = 8, accepted: int = 0) -> StepCounts:
    """What is counted of trees of which as many drafts are accepted each."""
    return StepCounts(node_counts={1 + drafts: count}, accepted={accepted: count})


def of_sources(model_accepted: int) -> StepCounts:
    """What is counted of 40 trees whose index is always right."""
    nodes, accepted = {"index": 40, "model": 300}, {"index": 40}
    return replace(
        trees(40, accepted=1),
        source_nodes=nodes,
        source_accepted={**accepted, "model": model_accepted},
    )


@pytest.mark.parametrize(
    ("steps", "is_missing"),
    [
        ([trees(40)], True),
        ([trees(1)] * 40, True),
        ([trees(1)] * 39, False),
        ([trees(200, drafts=1)], False),
        ([trees(400, drafts=1)], True),
        ([trees(1, accepted=1), trees(40)], False),
        ([of_sources(0)], True),
        ([of_sources(1)], False),
    ],
)
def test_drafts_that_are_never_accepted(
    steps: list[StepCounts], is_missing: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Red when a useless drafter stays unseen, a useful one is named, or both twice.

    Red, too, when the model beside an index is judged by what the index drafts.
    """
    vllm_config = config()
    spec = {"method": "sd", "model": "a/draft"}
    vllm_config.additional_config = {"treespec": spec}
    engine = started(vllm_config)
    for counts in steps:
        drafts = TreeDraftTokenIds([], [], {}, counts)
        engine.scheduler.update_draft_token_ids(drafts)
    labels = {"model_name": MODEL_NAME, "engine": "0"}
    shown_value = prometheus_client.REGISTRY.get_sample_value(
        "vllm:treespec_drafts_never_accepted", labels
    )
    assert shown_value == is_missing
    engine.end_step()
    warned = [r.message for r in caplog.records if "was accepted" in r.message]
    assert len(warned) == is_missing
    assert all("draft tokens of a/draft was accepted" in text for text in warned)


def test_names_are_documented() -> None:
    """Red when docs/metrics.md misses a counter or names one that is gone."""
    text = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text()
    names = [*metrics.COUNTERS, *metrics.GAUGES]
    ours = {metrics.PREFIX + name for name in names}
    assert {
        n.removesuffix("_total") for n in re.findall(r"vllm:treespec_\w+", text)
    } == ours
    assert {family.name for family in registered_collector().describe()} == ours
