"""Times forwards when an engine starts, so that the schedule begins with costs."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

import torch

from vllm_treespec.engine.draft_model import PagedDraftModel
from vllm_treespec.schedule.forward_times import (
    LEVELS_SECONDS,
    TARGET_SECONDS,
    ForwardTimes,
    time_rows,
)
from vllm_treespec.schedule.scheduler import AdaptiveScheduler

if TYPE_CHECKING:
    from vllm_treespec.engine.v1.runner import TreeRunnerMixin

# vLLM prints the lines of loggers below "vllm".
logger = logging.getLogger("vllm.treespec")


@torch.inference_mode()
def time_forwards(runner: TreeRunnerMixin) -> None:
    """Let an adaptive schedule know what forwards take; nothing where it knows already.

    The runner is warmed up. Attention has no context, and nothing is sampled: what that
    takes, steps will show. Data-parallel engines run their forwards together, and are
    not timed.
    """
    schedule = runner.decoder.method.schedule
    if not isinstance(schedule, AdaptiveScheduler) or schedule.cost.forwards.target:
        return
    if runner.parallel_config.data_parallel_size > 1:
        return
    models = [s for s in runner.drafter.paged if isinstance(s, PagedDraftModel)]

    def run_target(num_rows: int) -> None:
        hidden, _ = runner._dummy_run(num_rows, skip_eplb=True)
        runner.model.compute_logits(hidden[:num_rows])
        runner.wait_for_device()

    def run_level(num_rows: int) -> None:
        for model in models:
            model.run_level(num_rows)
        runner.wait_for_device()

    start = time.perf_counter()
    share, most_rows = schedule.share, runner.max_num_tokens
    target = time_rows(run_target, share, most_rows, TARGET_SECONDS)
    draft: dict[int, float] = {}
    if models:
        draft = time_rows(run_level, share, most_rows, LEVELS_SECONDS)
    schedule.begin_with(ForwardTimes(target, draft))
    logger.info(
        "The schedule begins with timed forwards (%.1f s): %s",
        time.perf_counter() - start,
        "; ".join(
            f"{name}, ms by rows: {in_ms(seconds)}"
            for name, seconds in (("target", target), ("draft models", draft))
            if seconds
        )
        or "none, as they take too long to time them several times",
    )


def in_ms(seconds: dict[int, float]) -> str:
    """Write times by rows."""
    return ", ".join(f"{rows} {1000 * found:.1f}" for rows, found in seconds.items())
