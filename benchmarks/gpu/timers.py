"""Time of the target's forwards, as the device itself sees it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch


class ForwardTimers:
    """Times the target's layers and its output layer in every step of a worker.

    On a GPU by CUDA events on the stream: what the device did between the first and
    the last kernel of a forward, whenever the host enqueued them.
    """

    def __init__(self, worker: Any) -> None:
        """Put timers around the runner's forward and the model's logits."""
        runner = worker.model_runner
        self.cuda = runner.device.type == "cuda"
        self.marks: dict[str, list[tuple[Any, Any]]] = {"layers": [], "logits": []}
        runner._model_forward = self.timed("layers", runner._model_forward)
        runner.model.compute_logits = self.timed("logits", runner.model.compute_logits)

    def timed(self, part: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a call so that its start and end are marked."""

        def run(*args: Any, **options: Any) -> Any:
            start = self.mark()
            result = call(*args, **options)
            self.marks[part].append((start, self.mark()))
            return result

        return run

    def mark(self) -> Any:
        """A point in time: an event on the current stream, seconds on a CPU."""
        if not self.cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def take(self) -> dict[str, float]:
        """Milliseconds of each part since the last call."""
        if self.cuda:
            torch.cuda.synchronize()
        found = {}
        for part, pairs in self.marks.items():
            found[part] = sum(self.elapsed_ms(*pair) for pair in pairs)
            pairs.clear()
        return found

    def elapsed_ms(self, start: Any, end: Any) -> float:
        """Milliseconds between two marks."""
        if self.cuda:
            return float(start.elapsed_time(end))
        return 1000 * (end - start)


def start_timers(worker: Any) -> None:
    """Give a worker timers, through ``LLM.collective_rpc``."""
    worker.forward_timers = ForwardTimers(worker)


def take_times(worker: Any) -> dict[str, float]:
    """Milliseconds since the last call, through ``LLM.collective_rpc``."""
    return worker.forward_timers.take()
