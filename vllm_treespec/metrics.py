"""Our counters beside vLLM's own.

The first worker hands what it counted to the scheduler, with the drafts of each step.
The scheduler's process adds it up in a file of Prometheus' own format. A collector in
the front-end, the process that answers ``/metrics``, shows what the file holds. These
two processes run on one machine, the worker may run on another. docs/metrics.md lists
the counters.
"""

from __future__ import annotations

import functools
import json
import logging
import os
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from multiprocessing.util import Finalize
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import prometheus_client
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.mmap_dict import MmapedDict, mmap_key
from prometheus_client.registry import Collector

from vllm_treespec.aids import Aid
from vllm_treespec.batch.stats import (
    DRAFT_FORWARD,
    KEEP_FEATURES,
    STAGES,
    Acceptance,
    StepCounts,
)

if TYPE_CHECKING:
    from vllm.config import VllmConfig

# Room for about a thousand series, taken when the file is made: a disk that is full
# later would kill the process that writes.
_FILE_SIZE = 2**18
# LLM.get_metrics shows nothing else.
PREFIX = "vllm:treespec_"
# Label of its own if any, and help text.
COUNTERS = {
    "num_accepted_tokens_per_depth": (
        "depth",
        "Accepted draft tokens per depth of the tree, from 1.",
    ),
    "num_nodes_verified": (None, "Tree nodes the target scored, roots included."),
    "num_nodes_wasted": (
        None,
        "Tree nodes scored that are neither root nor accepted.",
    ),
    "num_beam_tokens": (
        None,
        "Tokens of all beams that draft trees were made from.",
    ),
    "num_beam_nodes": (
        None,
        "Draft nodes that beams were merged into, roots excluded.",
    ),
    "num_leftover_nodes": (
        None,
        "Draft nodes scored that came from what an earlier step left over.",
    ),
    "num_leftover_nodes_accepted": (None, "How many of them were accepted."),
    "num_source_nodes": (
        "source",
        "Draft nodes scored per source of a tree that two sources draft.",
    ),
    "num_source_nodes_accepted": ("source", "How many of them were accepted."),
    "stage_seconds": (
        "stage",
        "Seconds of worker time per stage; draft_forward and keep_features are parts "
        "of draft.",
    ),
    "num_steps": ("mode", "Steps per mode: the tree drafted with, or plain."),
    "mode_seconds": (
        "mode",
        "Seconds of steps that only decoded, from choosing a tree to the next choice.",
    ),
    "mode_tokens": ("mode", "Tokens emitted in these steps."),
}
# Help text.
GAUGES = {
    "drafts_never_accepted": "1 if many drafts were scored and none was accepted, or 0."
}
# vLLM prints the lines of loggers below "vllm".
logger = logging.getLogger("vllm.treespec")


def multiprocess_folder() -> Path | None:
    """Folder in which Prometheus gathers the files of several processes, if any.

    vLLM sets it for several API servers, before it starts other processes.
    """
    folder = os.environ.get("PROMETHEUS_MULTIPROC_DIR")
    return Path(folder) if folder else None


def counter_file(vllm_config: VllmConfig, engine_index: int = 0) -> Path:
    """File in which an engine's scheduler counts for the front-end.

    vLLM gives each launch an ``instance_id``, which its processes receive with the
    config, and each engine of a data-parallel launch an index.

    Raises:
        OSError: there is no temporary folder.

    """
    name = f"{vllm_config.instance_id}-{engine_index}"
    folder = multiprocess_folder()
    if folder is not None:
        return folder / f"counter_treespec-{name}.db"
    return Path(tempfile.gettempdir()) / f"treespec_{name}"


def counter_files(vllm_config: VllmConfig) -> list[Path]:
    """Files of all engines of a launch, also of those that other machines start.

    Raises:
        OSError: there is no temporary folder.

    """
    num_engines = vllm_config.parallel_config.data_parallel_size
    return [counter_file(vllm_config, index) for index in range(num_engines)]


def make_counter_file(file: Path) -> BinaryIO:
    """Make an empty file, readable for this user only, and open it.

    Raises:
        OSError: there is such a file, or no room for it.

    """
    descriptor = os.open(file, os.O_CREAT | os.O_EXCL | os.O_RDWR, mode=0o600)
    opened = os.fdopen(descriptor, "r+b")
    try:
        os.posix_fallocate(descriptor, 0, _FILE_SIZE)
    except OSError:
        opened.close()
        file.unlink()
        raise
    return opened


class SharedCounters:
    """Counters in a file of Prometheus' own format, which other processes read.

    A reader may see a step half counted; it never sees half a number.
    """

    def __init__(self, file: Path, model_name: str, engine_index: int) -> None:
        """Open a file of ``make_counter_file``; counters of known labels start at 0.

        Raises:
            OSError: the file cannot be opened.

        """
        self._file = MmapedDict(str(file))
        self._labels = {"model_name": model_name, "engine": str(engine_index)}
        self._keys: dict[tuple[str, str], str] = {}
        self._values: defaultdict[str, float] = defaultdict(float)
        self._acceptance = Acceptance()
        self.add(StepCounts())
        for stage in (*STAGES, DRAFT_FORWARD, KEEP_FEATURES):
            self._add("stage_seconds", 0, stage)

    def add(self, counts: StepCounts) -> None:
        """Add what a worker handed over."""
        for stage, seconds in counts.seconds.items():
            self._add("stage_seconds", seconds, stage)
        for mode, steps in counts.modes.items():
            self._add("num_steps", steps, mode)
        for mode, seconds in counts.mode_seconds.items():
            self._add("mode_seconds", seconds, mode)
            self._add("mode_tokens", counts.mode_tokens[mode], mode)
        for depth in range(1, max(counts.accepted, default=0) + 1):
            reached = sum(t for n, t in counts.accepted.items() if n >= depth)
            self._add("num_accepted_tokens_per_depth", reached, str(depth))
        num_accepted = sum(n * trees for n, trees in counts.accepted.items())
        self._add("num_nodes_verified", counts.nodes)
        self._add("num_nodes_wasted", counts.nodes - counts.trees - num_accepted)
        self._add("num_beam_tokens", counts.beam_tokens)
        self._add("num_beam_nodes", counts.beam_nodes)
        self._add("num_leftover_nodes", counts.leftover_nodes)
        self._add("num_leftover_nodes_accepted", counts.leftover_accepted)
        for source, nodes in counts.source_nodes.items():
            self._add("num_source_nodes", nodes, source)
        for source, accepted in counts.source_accepted.items():
            self._add("num_source_nodes_accepted", accepted, source)
        self._acceptance.add(counts)
        self._set("drafts_never_accepted", self._acceptance.is_missing)

    def _set(self, gauge: str, value: float) -> None:
        """Set a gauge of ``GAUGES``."""
        name, labels = PREFIX + gauge, self._labels
        key = mmap_key(name, name, [*labels], [*labels.values()], GAUGES[gauge])
        self._file.write_value(key, value, 0.0)

    def _add(self, counter: str, amount: float, value: str = "") -> None:
        """Add to a counter of ``COUNTERS``, at a value of its own label if any."""
        key = self._keys.get((counter, value))
        if key is None:
            label, text = COUNTERS[counter]
            labels = {**self._labels, **({label: value} if label else {})}
            name = PREFIX + counter
            key = mmap_key(name, f"{name}_total", [*labels], [*labels.values()], text)
            self._keys[counter, value] = key
        elif not amount:
            return
        self._values[key] += amount
        self._file.write_value(key, self._values[key], 0.0)


def open_counters(vllm_config: VllmConfig) -> SharedCounters | None:
    """Open the file of an engine in its scheduler's process, if the front-end made one.

    Under an external launcher every rank has a scheduler; only rank 0 counts. Without
    metrics serving goes on: a file that cannot be opened is a warning.
    """
    parallel = vllm_config.parallel_config
    model_name = str(vllm_config.model_config.served_model_name)
    try:
        file = counter_file(vllm_config, parallel.data_parallel_index)
        if parallel.rank != 0 or not file.exists():
            return None
        counters = SharedCounters(file, model_name, parallel.data_parallel_index)
        # The front-end has it open. Without a name nothing stays behind, whichever
        # process ends first and however.
        if multiprocess_folder() is None:
            file.unlink()
    except OSError as error:
        logger.warning("No metrics of draft trees: %s", error)
        return None
    return counters


class TreeCollector(Collector):
    """Shows the counters of the engines with draft trees that this process made last.

    They are one engine, or those of a data-parallel launch.
    """

    def __init__(self) -> None:
        """Show nothing yet."""
        self._aid = Aid("Showing counters of draft trees", "/metrics lacks them")
        self._files: list[BinaryIO] = []
        self._remove: Finalize | None = None

    def show_engines(self, vllm_config: VllmConfig) -> None:
        """Make the files of engines that will start, and show them from now on.

        Raises:
            OSError: a file cannot be made.

        """
        if self._remove is not None:
            self._remove()
        paths = counter_files(vllm_config)
        files = self._files = []

        def remove() -> None:
            # The schedulers have removed those of engines that were started.
            for file, path in zip(files, paths, strict=False):
                file.close()
                path.unlink(missing_ok=True)
            files.clear()

        self._remove = Finalize(self, remove, exitpriority=0)
        for path in paths:
            files.append(make_counter_file(path))

    def describe(self) -> Iterator[CounterMetricFamily | GaugeMetricFamily]:
        """Name the counters and gauges, without values."""
        for name, (_, text) in COUNTERS.items():
            yield CounterMetricFamily(PREFIX + name, text)
        for name, text in GAUGES.items():
            yield GaugeMetricFamily(PREFIX + name, text)

    def collect(self) -> Iterator[CounterMetricFamily | GaugeMetricFamily]:
        """Read the counters; there are none before the scheduler has started."""
        yield from self._aid.run([], self._families)

    def _families(self) -> list[CounterMetricFamily | GaugeMetricFamily]:
        families: dict[str, CounterMetricFamily | GaugeMetricFamily] = {}
        for file in self._files:
            # By its descriptor: the file has lost its name.
            path = f"/proc/self/fd/{file.fileno()}"
            for key, value, _, _ in MmapedDict.read_all_values_from_file(path):
                name, _, labels, text = json.loads(key)
                if name not in families:
                    is_gauge = name.removeprefix(PREFIX) in GAUGES
                    kind = GaugeMetricFamily if is_gauge else CounterMetricFamily
                    families[name] = kind(name, text, labels=[*labels])
                families[name].add_metric([*labels.values()], value)
        return [*families.values()]


@functools.cache
def registered_collector() -> TreeCollector:
    """The collector of this process, on Prometheus' registry from the first call."""
    collector = TreeCollector()
    prometheus_client.REGISTRY.register(collector)
    return collector


def show_counters(vllm_config: VllmConfig) -> None:
    """Show the counters of an engine with draft trees that this process will start.

    Without metrics serving goes on: a file that cannot be made is a warning.
    """
    aid = Aid("Showing counters of draft trees", "/metrics lacks them")
    aid.run(None, _show_counters, vllm_config)


def _show_counters(vllm_config: VllmConfig) -> None:
    """The same, an unforeseen error apart."""
    try:
        if multiprocess_folder() is None:
            registered_collector().show_engines(vllm_config)
        else:
            # Whoever answers /metrics reads all files of that folder.
            for file in counter_files(vllm_config):
                make_counter_file(file).close()
    except OSError as error:
        logger.warning("No metrics of draft trees: %s", error)
