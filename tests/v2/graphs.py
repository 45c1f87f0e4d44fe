"""CUDA graphs without CUDA: what a graph would replay is run again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any, ClassVar

from vllm.config import CUDAGraphMode
from vllm.v1.worker.gpu import cudagraph_utils


class Graph:
    """A forward with the metadata with which it was captured.

    As on a card, replays read the tensors that were there at the capture, and take
    nothing else of the running step.
    """

    # replays so far by (requests, rows)
    replays: ClassVar[Counter[tuple[int, int]]] = Counter()

    def __init__(self, forward: Callable[[Any], None], shape: tuple[int, int]) -> None:
        """Take what is replayed."""
        self.forward = forward
        self.shape = shape

    def replay(self) -> None:
        """Run the forward."""
        Graph.replays[self.shape] += 1
        self.forward(CUDAGraphMode.NONE)


def install() -> None:
    """Let vLLM capture such graphs."""
    cudagraph_utils.CudaGraphManager.capture = capture


def capture(self: Any, create_forward_fn: Any, progress_bar_desc: str = "") -> None:
    """Capture all full graphs; those of pieces need a compiler."""
    for desc in self._capture_descs.get(CUDAGraphMode.FULL, ()):
        create_forward_fn(desc, warmup=True)(CUDAGraphMode.NONE)
        forward = create_forward_fn(desc, warmup=False)
        forward(CUDAGraphMode.NONE)
        self.graphs[desc] = Graph(forward, (desc.num_reqs, desc.num_tokens))
    self._graphs_captured = True
