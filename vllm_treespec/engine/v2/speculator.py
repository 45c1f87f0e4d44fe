"""What stands in the place of vLLM's speculator: trees are drawn later."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from vllm.config import CUDAGraphMode, VllmConfig
from vllm.v1.worker.gpu.cudagraph_utils import (
    BatchExecutionDescriptor,
    CudaGraphManager,
)

from vllm_treespec.batch.stats import DRAFT_FORWARD
from vllm_treespec.step.captured import CapturedTrees, TreeShape

if TYPE_CHECKING:
    from collections.abc import Callable

    from vllm_treespec.engine.v2.vllm_types import InputBatch
    from vllm_treespec.proposers import Proposer, ProposerInputs
    from vllm_treespec.step.drafting import Start
    from vllm_treespec.trees.draft import Draft


@dataclass(frozen=True)
class DraftGraph(BatchExecutionDescriptor):
    """Which graph draws trees of a shape."""

    shape: TreeShape | None = None

    @classmethod
    def of(cls, shape: TreeShape) -> DraftGraph:
        """The graph of a shape."""
        size = shape.num_trees
        return cls(CUDAGraphMode.FULL, size, size, shape=shape)


class DraftGraphs(CudaGraphManager):
    """CUDA graphs that draw trees, captured as vLLM captures those of the target."""

    def __init__(
        self, vllm_config: VllmConfig, device: torch.device, trees: CapturedTrees
    ) -> None:
        """Capture nothing yet."""
        self.trees = trees
        super().__init__(vllm_config, device, CUDAGraphMode.FULL, decode_query_len=1)

    def _init_candidates(self) -> None:
        """List our graphs in the place of the target's."""
        graphs = [DraftGraph.of(shape) for shape in self.trees.shapes()]
        self._capture_descs = {CUDAGraphMode.FULL: graphs}

    def forward(
        self, graph: DraftGraph, warmup: bool
    ) -> Callable[[CUDAGraphMode], None]:
        """What a graph holds."""
        assert graph.shape is not None
        return partial(self._run, graph.shape)

    def _run(self, shape: TreeShape, mode: CUDAGraphMode) -> None:
        self.trees.run(shape)


class LateDrafts:
    """Proposes nothing at the end of a step: the next one begins by drawing its trees.

    It has the interface of vLLM's ``BaseSpeculator``, as far as runners call it. vLLM
    measures the memory of its graphs, too, and drops managers that it finds here before
    it captures for good.
    """

    supports_mm_inputs = False
    draft_logits = None
    num_query_per_req = 1
    num_extra_query_per_req = 0
    pcp_manager = None

    def __init__(
        self,
        vllm_config: VllmConfig,
        max_num_reqs: int,
        num_drafts: int,
        device: torch.device,
        trees: CapturedTrees | None,
    ) -> None:
        """Allocate the placeholders; without ``trees`` there are no graphs."""
        self.vllm_config = vllm_config
        self.device = device
        self.trees = trees
        self.graphs: DraftGraphs | None = None
        self.max_blocks = 0
        # token 0, always: -1 would be read outside of the embedding
        self.placeholders = torch.zeros(
            (max_num_reqs, num_drafts), dtype=torch.int64, device=device
        )

    def bind(self, max_blocks: int) -> None:
        """Take the columns of the block table."""
        self.max_blocks = max_blocks

    def init_cudagraph_manager(self, cudagraph_mode: CUDAGraphMode) -> None:
        """Prepare to capture, if the target has full graphs, too."""
        self.graphs = None
        if self.trees is not None and cudagraph_mode.has_full_cudagraphs():
            self.graphs = DraftGraphs(self.vllm_config, self.device, self.trees)

    def capture(self) -> None:
        """Capture the graphs of all shapes."""
        if self.graphs is not None:
            self.graphs.trees.allocate(self.max_blocks)
            self.graphs.capture(self.graphs.forward, "Capturing CUDA graphs of drafts")
            # forwards of no step
            self.graphs.trees.stats.reset()
            self.graphs.trees.stats.hand_over()

    def replay(
        self, start: Start, proposer: Proposer, inputs: ProposerInputs
    ) -> Draft | None:
        """Draw a step's trees in a graph; None: no graph fits.

        Args:
            start: what they grow from.
            proposer: what would draw.
            inputs: of the step.

        """
        if self.graphs is None:
            return None
        trees = self.graphs.trees
        shape = trees.shape_of(proposer, inputs)
        if shape is None:
            return None
        graph = DraftGraph.of(shape)
        if graph not in self.graphs.graphs:
            # vLLM draws in runs before it captures
            return None
        trees.fill(shape, inputs, start)
        with trees.stats.stage(DRAFT_FORWARD):
            self.graphs.run_fullgraph(graph)
        return trees.drawn(shape, len(inputs.root_token_ids))

    def propose(
        self, input_batch: InputBatch, *inputs: object, **options: object
    ) -> Tensor:
        """Placeholders, int64 [num_reqs, num_drafts]."""
        return self.placeholders[: input_batch.num_reqs]
