"""What the workers that run draft trees share."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm_treespec.engine.v1.vllm_types import V1Worker
else:
    V1Worker = object


class TreeWorkerMixin(V1Worker):
    """What CPU and GPU workers share."""

    def determine_available_memory(self) -> int:
        """Memory for the scheduler's KV blocks.

        Fork blocks take a part, and features that are kept beside each block.
        """
        available = super().determine_available_memory()
        runner = self.model_runner
        block_size = self.cache_config.block_size
        page_bytes = sum(s.page_size_bytes for s in runner.get_kv_cache_spec().values())
        num_fork_blocks = runner.decoder.layout.num_fork_blocks(block_size)
        fork_bytes = num_fork_blocks * page_bytes
        if fork_bytes >= available:
            raise ValueError(
                f"fork blocks of draft trees need {fork_bytes / 2**30:.2f} GiB of the "
                f"{available / 2**30:.2f} GiB for KV cache; lower 'max_trees' or the "
                "tree in speculative_config, or --block-size, or give more KV memory"
            )
        feature_bytes = sum(s.feature_bytes(block_size) for s in runner.drafter.paged)
        return (available - fork_bytes) * page_bytes // (page_bytes + feature_bytes)

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
