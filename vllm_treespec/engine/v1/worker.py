"""What the workers that run draft trees share."""

from __future__ import annotations

from typing import Any


class TreeWorkerMixin:
    """What CPU and GPU workers share."""

    def determine_available_memory(self) -> int:
        """Memory for the scheduler's KV blocks: what is left beside fork blocks."""
        worker: Any = self
        available = super().determine_available_memory()  # type: ignore[misc]
        runner = worker.model_runner
        block_size = worker.cache_config.block_size
        page_bytes = sum(s.page_size_bytes for s in runner.get_kv_cache_spec().values())
        fork_bytes = runner.drafter.num_fork_blocks(block_size) * page_bytes
        if fork_bytes >= available:
            raise ValueError(
                f"fork blocks of draft trees need {fork_bytes / 2**30:.2f} GiB of the "
                f"{available / 2**30:.2f} GiB for KV cache; lower 'max_trees' or the "
                "tree in speculative_config, or --block-size, or give more KV memory"
            )
        return available - fork_bytes

    def treespec_stats(self, reset: bool = False) -> dict[str, Any]:
        """Totals of this worker's steps, for ``LLM.collective_rpc``."""
        worker: Any = self
        totals = worker.model_runner.stats.as_dict()
        if reset:
            worker.model_runner.stats.reset()
        return totals

    def treespec_use(self, shape: dict[str, Any] | None) -> None:
        """Draw the schedule's tree of this shape in every step; None: the schedule's.

        For benchmarks and tests, through ``LLM.collective_rpc``.
        """
        worker: Any = self
        worker.model_runner.drafter.schedule.use_always(shape)
