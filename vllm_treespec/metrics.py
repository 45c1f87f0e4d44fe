"""Our counters beside vLLM's, in the process that answers ``/metrics``.

The engine's first worker counts in a file of Prometheus' own format; a collector in the
front-end shows what the file holds. docs/metrics.md lists all.
"""

from __future__ import annotations

import functools
import json
import logging
import os
from collections.abc import Iterator
from multiprocessing.util import Finalize
from typing import TYPE_CHECKING, BinaryIO

import prometheus_client
from prometheus_client.metrics_core import CounterMetricFamily
from prometheus_client.mmap_dict import MmapedDict
from prometheus_client.registry import Collector

from vllm_treespec.core.stats import (
    COUNTERS,
    PREFIX,
    counter_file,
    make_counter_file,
)

if TYPE_CHECKING:
    from vllm.config import VllmConfig

# vLLM prints the lines of loggers below "vllm".
logger = logging.getLogger("vllm.treespec")


class TreeCollector(Collector):
    """Shows the counters of the engine with draft trees that this process made last."""

    def __init__(self) -> None:
        """Show nothing yet."""
        self._file: BinaryIO | None = None
        self._remove: Finalize | None = None

    def follow(self, vllm_config: VllmConfig) -> None:
        """Make the file of an engine that will start, and show it from now on.

        Raises:
            OSError: the file cannot be made.

        """
        if self._remove is not None:
            self._file = None
            self._remove()
        path = counter_file(vllm_config)
        file = make_counter_file(path)

        def remove() -> None:
            file.close()
            # The worker has removed it already, if one was started.
            path.unlink(missing_ok=True)

        self._file = file
        self._remove = Finalize(self, remove, exitpriority=0)

    def describe(self) -> Iterator[CounterMetricFamily]:
        """Name the counters, without values."""
        for name, (_, text) in COUNTERS.items():
            yield CounterMetricFamily(PREFIX + name, text)

    def collect(self) -> Iterator[CounterMetricFamily]:
        """Read the counters; there are none before a worker counts."""
        if self._file is None:
            return
        families: dict[str, CounterMetricFamily] = {}
        # By its descriptor: the file has lost its name.
        path = f"/proc/self/fd/{self._file.fileno()}"
        for key, value, _, _ in MmapedDict.read_all_values_from_file(path):
            name, _, labels, text = json.loads(key)
            if name not in families:
                families[name] = CounterMetricFamily(name, text, labels=[*labels])
            families[name].add_metric([*labels.values()], value)
        yield from families.values()


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
    try:
        if "PROMETHEUS_MULTIPROC_DIR" in os.environ:
            # Whoever answers /metrics reads all files of that folder.
            make_counter_file(counter_file(vllm_config)).close()
        else:
            registered_collector().follow(vllm_config)
    except OSError as error:
        logger.warning("No metrics of draft trees: %s", error)
