"""What the adaptive scheduler learned, in a file for the next start."""

from __future__ import annotations

import copy
import hashlib
import logging
import os
import platform
import time
from collections.abc import Callable
from pathlib import Path

import torch
import vllm
import vllm.envs as envs
from pydantic import BaseModel
from vllm.config import VllmConfig
from vllm.distributed import get_tp_group
from vllm.platforms import current_platform

from vllm_treespec import __version__
from vllm_treespec.aids import Aid, aiding
from vllm_treespec.schedule.saved import SchedulerState, restore, state_of
from vllm_treespec.schedule.scheduler import AdaptiveScheduler

# vLLM prints the lines of loggers below "vllm".
logger = logging.getLogger("vllm.treespec")

# Bytes that a file is read up to; all batch sizes of ten trees take a hundredth.
MOST_BYTES = 2**22
# Seconds from the first step to the first writing, which double, and at most.
FIRST_SECONDS, MOST_SECONDS = 10.0, 600.0


class Kept(BaseModel):
    """What a file holds."""

    # what the times depend on, in words
    origin: dict[str, str]
    state: SchedulerState


def origin_of(vllm_config: VllmConfig, schedule: AdaptiveScheduler) -> dict[str, str]:
    """What the times of steps depend on, the processor's speed apart."""
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    facts = {
        "target": model.model,
        "dtype": model.dtype,
        "eager": model.enforce_eager,
        "drafter": sorted(vllm_config.additional_config["treespec"].items()),
        "trees": [tree.name for tree in schedule.trees],
        "ranks": parallel.tensor_parallel_size,
        "device": current_platform.get_device_name(),
        "machine": f"{platform.machine()}, {os.cpu_count()} processors",
        "threads": torch.get_num_threads(),
        "vllm": vllm.__version__,
        "vllm_treespec": __version__,
    }
    return {name: str(fact) for name, fact in facts.items()}


class ScheduleCache:
    """Keeps what a schedule learned in a folder, a file for each origin.

    The first of the tensor-parallel ranks reads and writes.
    """

    def __init__(
        self,
        folder: Path,
        origin: dict[str, str],
        schedule: AdaptiveScheduler,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Take what is to be kept; reads nothing yet.

        Args:
            folder: made when something is written.
            origin: what the times depend on.
            schedule: that has measured nothing.
            clock: gives seconds.

        """
        text = repr(sorted(origin.items()))
        self.file = folder / f"{hashlib.sha256(text.encode()).hexdigest()[:16]}.json"
        self.origin = origin
        self.schedule = schedule
        self.clock = clock
        self.aid = Aid("The schedule's cache", "the next start measures anew")
        self.is_writer = get_tp_group().is_first_rank
        self.wait = FIRST_SECONDS
        self.next_write: float | None = None

    def load(self) -> None:
        """Let the schedule begin with what the file holds, the same on all ranks."""
        kept = self.aid.run(None, self._read) if self.is_writer else None
        state: SchedulerState | None = get_tp_group().broadcast_object(kept)
        if state is not None:
            restore(self.schedule, state)
            logger.info("The schedule begins with what %s holds", self.file)

    def _read(self) -> SchedulerState | None:
        """What the file holds, if there is one, and the schedule can begin with it."""
        try:
            if not self.file.exists():
                return None
            if not self.file.is_file():
                raise ValueError("no schedule's file")
            with self.file.open("rb") as opened:
                kept = Kept.model_validate_json(opened.read(MOST_BYTES))
            if kept.origin != self.origin:
                raise ValueError("another engine's file")
            # Once all ranks begin with it, it must not fail.
            restore(copy.deepcopy(self.schedule), kept.state)
        except (OSError, ValueError, LookupError, ArithmeticError) as error:
            logger.warning(
                "%s cannot be read, so the schedule measures anew (%s: %s)",
                self.file,
                type(error).__name__,
                str(error).splitlines()[0],
            )
            return None
        return kept.state

    @aiding
    def save_if_due(self) -> None:
        """Write the file from time to time, as long as the schedule works."""
        now = self.clock()
        if self.next_write is None:
            self.next_write = now + self.wait
        if not self.is_writer or now < self.next_write or not self.schedule.aid.is_on:
            return
        self.wait = min(2 * self.wait, MOST_SECONDS)
        self.next_write = now + self.wait
        self._write()

    def _write(self) -> None:
        """Put the file in place of the last one; readers see the one or the other."""
        # A copy: what is learned fades while it is read, which ranks must do alike.
        learned = state_of(copy.deepcopy(self.schedule))
        kept = Kept(origin=self.origin, state=learned)
        part = self.file.with_suffix(f".{os.getpid()}.part")
        try:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            part.write_text(kept.model_dump_json(indent=1))
            part.replace(self.file)
        except OSError as error:
            self.is_writer = False
            logger.warning(
                "What the schedule learned cannot be kept for the next start (%s). Let "
                'VLLM_CACHE_ROOT name a folder that can be written, or set "schedule_'
                'cache" to false',
                error,
            )


def cache_folder() -> Path:
    """Where the files lie, in vLLM's own cache."""
    return Path(envs.VLLM_CACHE_ROOT) / "vllm_treespec" / "schedule"
