"""Ray Serve LLM with draft trees, whose counters stand at Ray's metrics endpoint.

Ray collects metrics from each process itself. So the replica reads the counters that
its scheduler writes (:mod:`vllm_treespec.metrics`), and hands them to Ray.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from ray.llm._internal.serve.engines.vllm.vllm_engine import VLLMEngine
from ray.serve.llm.deployment import LLMServer
from vllm.v1.metrics.ray_wrappers import RayCounterWrapper

from vllm_treespec.aids import Aid
from vllm_treespec.metrics import registered_collector, show_counters

if TYPE_CHECKING:
    from vllm.config import VllmConfig

SECONDS = 2.0


class RayCounters:
    """Our counters as Ray's."""

    def __init__(self) -> None:
        """Have none yet."""
        self._counters: dict[str, RayCounterWrapper] = {}
        self._known: dict[tuple[str, tuple[str, ...]], float] = {}

    def update(self) -> None:
        """Add what was counted since the last call."""
        for family in registered_collector().collect():
            for sample in family.samples:
                counter = self._counters.get(family.name)
                if counter is None:
                    counter = RayCounterWrapper(
                        family.name, family.documentation, [*sample.labels]
                    )
                    self._counters[family.name] = counter
                key = family.name, tuple(sample.labels.values())
                more = sample.value - self._known.get(key, 0.0)
                self._known[key] = sample.value
                counter.labels(**sample.labels).inc(more)


class TreeVLLMEngine(VLLMEngine):
    """Ray's vLLM engine; the counters of its scheduler come to this process."""

    def _start_async_llm_engine(
        self, engine_args: Any, vllm_config: VllmConfig, placement_group: Any
    ) -> Any:
        """Make the counters' file anew, then start the engine.

        On GPUs Ray makes the config in another process, which keeps the file it made.
        """
        if "treespec" in vllm_config.additional_config:
            vllm_config.instance_id += "-serve"
            show_counters(vllm_config)
        return super()._start_async_llm_engine(
            engine_args, vllm_config, placement_group
        )


class TreeLLMServer(LLMServer):
    """Ray's server of a model, as ``server_cls`` of an ``LLMConfig``.

    It serves models without draft trees, too.
    """

    _default_engine_cls = TreeVLLMEngine

    async def start(self) -> None:
        """Start the engine, and hand counters to Ray from then on."""
        await super().start()
        self._counting = asyncio.create_task(self._count())

    async def _count(self) -> None:
        counters = RayCounters()
        aid = Aid("Counting draft trees for Ray", "their metrics stand still")
        while aid.is_on:
            aid.run(None, counters.update)
            await asyncio.sleep(SECONDS)
