"""What the workers that run draft trees share."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from vllm_treespec.core.kv_budget import BlockBytes

if TYPE_CHECKING:
    from vllm_treespec.engine.v1.vllm_types import V1Worker
else:
    V1Worker = object


class TreeWorkerMixin(V1Worker):
    """What CPU and GPU workers share."""

    @contextmanager
    def stock_runner(self) -> Iterator[None]:
        """Keep custom logits processors from the stock runner, while it is made.

        It takes none together with drafts; our runner adds them afterwards.
        """
        config = self.vllm_config.model_config
        custom, config.logits_processors = config.logits_processors, None
        try:
            yield
        finally:
            config.logits_processors = custom

    def determine_available_memory(self) -> int:
        """Memory for the scheduler's KV blocks.

        Fork blocks take a part, and features that are kept beside each block.
        """
        available = super().determine_available_memory()
        runner = self.model_runner
        block_size = self.cache_config.block_size
        blocks = BlockBytes(
            kv=sum(s.page_size_bytes for s in runner.get_kv_cache_spec().values()),
            features=sum(s.feature_bytes(block_size) for s in runner.drafter.paged),
            num_fork_blocks=runner.decoder.layout.num_fork_blocks(block_size),
        )
        return blocks.for_scheduler(available)

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
