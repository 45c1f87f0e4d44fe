"""Our metrics beside vLLM's: the ``vllm.stat_logger_plugins`` entry point.

What was accepted comes with every step from vLLM's scheduler, like vLLM's own counters.
Seconds and modes are known to the worker alone; the front-end reads them from shared
memory (:class:`vllm_treespec.engine.stats.SharedTotals`). docs/metrics.md lists all.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import prometheus_client
from vllm.logger import init_logger
from vllm.v1.metrics.loggers import AggregateStatLoggerBase

from vllm_treespec.engine.stats import (
    DRAFT_FORWARD,
    STAGES,
    SharedTotals,
    shared_file,
)

if TYPE_CHECKING:
    from vllm import LLM
    from vllm.config import VllmConfig
    from vllm.v1.metrics.stats import SchedulerStats
    from vllm.v1.spec_decode.metrics import SpecDecodingStats

# vLLM shows and clears what starts with "vllm:" (LLM.get_metrics, a second engine in
# one process), and prints the lines of loggers below "vllm".
PREFIX = "vllm:treespec_"
ALL_STAGES = (*STAGES, DRAFT_FORWARD)
logger = init_logger("vllm.treespec")


@dataclass
class TreeTotals:
    """What an engine counted over some steps."""

    trees: int = 0
    # draft tokens that the target scored, roots excluded
    drafted: int = 0
    # by depth: trees of which at least that many draft tokens were accepted
    accepted: Counter[int] = field(default_factory=Counter)
    # by stage
    seconds: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    # by mode
    steps: Counter[str] = field(default_factory=Counter)
    # tokens of beams, and the draft nodes that they were merged into
    beams: Counter[str] = field(default_factory=Counter)

    @property
    def nodes(self) -> int:
        """Nodes that the target scored, roots included."""
        return self.trees + self.drafted

    @property
    def wasted(self) -> int:
        """Scored nodes that are neither root nor accepted."""
        return self.drafted - self.accepted.total()

    def add_drafts(self, stats: SpecDecodingStats) -> None:
        """Add what the scheduler counted in a step."""
        self.trees += stats.num_drafts
        self.drafted += stats.num_draft_tokens
        for depth, count in enumerate(stats.num_accepted_tokens_per_pos, start=1):
            if not count:
                break
            self.accepted[depth] += count

    def add_shared(self, grown: Mapping[str, float]) -> None:
        """Add what the worker counted, named as by ``StepStats``."""
        for name, amount in grown.items():
            kind, _, label = name.partition(":")
            if kind == "stage":
                self.seconds[label] += amount
            elif kind == "beam":
                self.beams[label] += int(amount)
            else:
                self.steps[label] += int(amount)

    def add(self, other: TreeTotals) -> None:
        """Add other steps."""
        self.trees += other.trees
        self.drafted += other.drafted
        self.accepted.update(other.accepted)
        self.steps.update(other.steps)
        self.beams.update(other.beams)
        for stage, seconds in other.seconds.items():
            self.seconds[stage] += seconds

    def line(self) -> str:
        """Text of the log line, empty when nothing was counted."""
        parts = []
        if self.trees:
            rates = (self.accepted[d] / self.trees for d in sorted(self.accepted))
            parts.append(
                f"Accepted by depth: {', '.join(f'{r:.3f}' for r in rates) or 'none'}, "
                f"Nodes verified: {self.nodes}, "
                f"Nodes wasted: {self.wasted} ({100 * self.wasted / self.nodes:.1f}%)"
            )
        if self.beams["nodes"]:
            ratio = self.beams["tokens"] / self.beams["nodes"]
            parts.append(f"Compression ratio: {ratio:.2f}")
        num_steps = self.steps.total()
        if num_steps:
            modes = (f"{mode} {self.steps[mode]}" for mode in sorted(self.steps))
            stages = (
                f"{stage} {1000 * self.seconds[stage] / num_steps:.2f}"
                for stage in ALL_STAGES
                if stage in self.seconds
            )
            parts.append(f"Steps: {', '.join(modes)}")
            parts.append(f"Milliseconds per step: {', '.join(stages)}")
        return ", ".join(parts)


class TreeCounters:
    """The Prometheus counters of one front-end, labelled by engine."""

    def __init__(self, model_name: str, engine_indexes: Iterable[int]) -> None:
        """Register the counters; those without labels of their own start at 0."""

        def counter(name: str, text: str, *labels: str) -> prometheus_client.Counter:
            names = ["model_name", "engine", *labels]
            return prometheus_client.Counter(PREFIX + name, text, names)

        self.accepted = counter(
            "num_accepted_tokens_per_depth",
            "Accepted draft tokens per depth of the tree, from 1.",
            "depth",
        )
        self.nodes = counter(
            "num_nodes_verified", "Tree nodes the target scored, roots included."
        )
        self.wasted = counter(
            "num_nodes_wasted", "Tree nodes scored that are neither root nor accepted."
        )
        self.beam_tokens = counter(
            "num_beam_tokens", "Tokens of all beams that draft trees were made from."
        )
        self.beam_nodes = counter(
            "num_beam_nodes", "Draft nodes that beams were merged into, roots excluded."
        )
        self.seconds = counter(
            "stage_seconds",
            "Seconds of worker time per stage; draft_forward is a part of draft.",
            "stage",
        )
        self.steps = counter(
            "num_steps", "Steps per mode: the tree drafted with, or plain.", "mode"
        )
        self.model_name = model_name
        none = TreeTotals()
        none.seconds.update(dict.fromkeys(ALL_STAGES, 0.0))
        for index in engine_indexes:
            self.add(index, none)

    def add(self, engine_index: int, totals: TreeTotals) -> None:
        """Add what an engine counted."""
        engine = (self.model_name, str(engine_index))
        self.nodes.labels(*engine).inc(totals.nodes)
        self.wasted.labels(*engine).inc(totals.wasted)
        self.beam_tokens.labels(*engine).inc(totals.beams["tokens"])
        self.beam_nodes.labels(*engine).inc(totals.beams["nodes"])
        for depth, count in totals.accepted.items():
            self.accepted.labels(*engine, str(depth)).inc(count)
        for stage, seconds in totals.seconds.items():
            self.seconds.labels(*engine, stage).inc(seconds)
        for mode, count in totals.steps.items():
            self.steps.labels(*engine, mode).inc(count)


class EngineReader:
    """One engine: its worker's totals, and what was counted since the last line."""

    def __init__(self, vllm_config: VllmConfig, engine_index: int) -> None:
        """Open the worker's shared totals if this process can reach them."""
        self.since_line = TreeTotals()
        self._shared: SharedTotals | None = None
        self._seen: dict[str, float] = {}
        file = shared_file(vllm_config, engine_index)
        if file.exists():
            self._shared = SharedTotals(file)
            # The mapping stays; nothing is left behind whichever process ends first.
            file.unlink()
        else:
            logger.warning(
                "Engine %03d: no seconds per stage and no modes in the metrics: the "
                "engine was started by another API server or on another machine",
                engine_index,
            )

    def step(self, stats: SchedulerStats) -> TreeTotals:
        """Return what was counted since the last call."""
        step = TreeTotals()
        if stats.spec_decoding_stats is not None:
            step.add_drafts(stats.spec_decoding_stats)
        if self._shared is not None:
            now, seen = self._shared.read(), self._seen
            grown = {name: now[name] - seen.get(name, 0) for name in now}
            step.add_shared({name: more for name, more in grown.items() if more})
            self._seen = now
        self.since_line.add(step)
        return step


class TreeStatLogger(AggregateStatLoggerBase):
    """Counts and logs draft trees; does nothing in engines without them."""

    def __init__(self, vllm_config: VllmConfig, engine_indexes: list[int]) -> None:
        """Note the engines; vLLM has not yet made its own metrics."""
        config: Any = vllm_config.additional_config
        self._active = isinstance(config, dict) and "treespec" in config
        self._vllm_config = vllm_config
        self._engine_indexes = engine_indexes
        self._engines: dict[int, EngineReader] = {}

    def log_engine_initialized(self) -> None:
        """Start: the engines run, and vLLM has cleared the metrics of earlier ones."""
        if not self._active:
            return
        model_name = self._vllm_config.model_config.served_model_name
        self._counters = TreeCounters(str(model_name), self._engine_indexes)
        self._engines = {
            index: EngineReader(self._vllm_config, index)
            for index in self._engine_indexes
        }

    def record(
        self,
        scheduler_stats: SchedulerStats | None,
        iteration_stats: Any,
        mm_cache_stats: Any = None,
        engine_idx: int = 0,
    ) -> None:
        """Count a step."""
        engine = self._engines.get(engine_idx)
        if engine is not None and scheduler_stats is not None:
            self._counters.add(engine_idx, engine.step(scheduler_stats))

    def log(self) -> None:
        """Print one line per engine that made steps since the last."""
        # One of several API servers sees only a part; vLLM's own lines are off too.
        if self._vllm_config.parallel_config._api_process_count > 1:
            return
        for index, engine in self._engines.items():
            line = engine.since_line.line()
            engine.since_line = TreeTotals()
            if line:
                logger.info("Engine %03d: TreeSpec metrics: %s", index, line)


def attach(llm: LLM) -> None:
    """Give an offline engine our metrics; vLLM loads stat loggers in servers only.

    Raises:
        ValueError: when the engine was made without statistics.

    """
    engine = llm.llm_engine
    if engine.logger_manager is None:
        raise ValueError("this LLM keeps no statistics; pass disable_log_stats=False")
    manager = engine.logger_manager
    stat_logger = TreeStatLogger(engine.vllm_config, manager.engine_indexes)
    stat_logger.log_engine_initialized()
    manager.stat_loggers.append(stat_logger)
