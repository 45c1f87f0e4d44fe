"""What the workers that run draft trees share."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import torch

from vllm_treespec.aids import Aid
from vllm_treespec.engine.kv_cache import bytes_by_group, cost_of_one_group
from vllm_treespec.engine.start_up import time_forwards
from vllm_treespec.layouts.kv_budget import BlockBytes

if TYPE_CHECKING:
    from vllm.v1.worker.worker_base import CompilationTimes

    from vllm_treespec.engine.vllm_types import StockWorker
else:
    StockWorker = object

# vLLM prints the lines of loggers below "vllm".
logger = logging.getLogger("vllm.treespec")


class TreeWorkerMixin(StockWorker):
    """What CPU and GPU workers share."""

    def determine_available_memory(self) -> int:
        """Memory for the scheduler's KV blocks.

        Fork blocks take a part, and features that are kept beside each block.
        """
        available = super().determine_available_memory()
        runner = self.model_runner
        block_size = self.cache_config.block_size
        specs = runner.get_kv_cache_spec()
        groups = bytes_by_group(self.vllm_config, specs)
        cost = cost_of_one_group(specs, runner.max_model_len)
        if len(groups) == 1 and cost > 1 and runner.parallel_config.rank == 0:
            logger.warning(
                "Draft trees keep the KV of all tokens, also in layers with a sliding "
                "window: a request of %d tokens takes %.1f times the KV memory that it "
                "takes without trees",
                runner.max_model_len,
                cost,
            )
        layout = runner.decoder.layout
        blocks = BlockBytes(
            kv=max(groups),
            features=sum(s.feature_bytes(block_size) for s in runner.drafter.paged),
            num_fork_blocks=layout.num_fork_blocks(block_size, len(groups)),
        )
        return blocks.for_scheduler(available)

    def compile_or_warm_up_model(self) -> CompilationTimes:
        """Warm up, time forwards for the schedule, and log that trees are on."""
        times = super().compile_or_warm_up_model()
        # A device may run out of memory on one rank alone.
        aid = Aid(
            "Timing forwards",
            "the schedule begins with guesses",
            torch.OutOfMemoryError,
        )
        aid.run(None, time_forwards, self.model_runner)
        if self.model_runner.parallel_config.rank == 0:
            config = self.model_runner.drafter.config
            logger.info(
                "Draft trees are on: %s %s, schedule %s, at most %d requests a step",
                config.name,
                config.shape_name,
                config.schedule if isinstance(config.schedule, str) else "listed",
                config.max_trees,
            )
        return times

    def treespec_stats(self, reset: bool = False) -> dict[str, object]:
        """Totals of this worker's steps, for ``LLM.collective_rpc``."""
        stats = self.model_runner.decoder.stats
        totals = stats.as_dict()
        if reset:
            stats.reset()
        return totals

    def treespec_use(self, shape: dict[str, object] | None) -> None:
        """Draw the schedule's tree of this shape in every step; None: the schedule's.

        For benchmarks and tests, through ``LLM.collective_rpc``.
        """
        self.model_runner.decoder.method.schedule.force_tree(shape)
