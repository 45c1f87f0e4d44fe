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
from vllm_treespec.scorers import ScorerOutput, TargetLogits
from vllm_treespec.step.captured import CapturedTrees, TreeShape
from vllm_treespec.step.captured_scores import CapturedScores, ScoreShape

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np

    from vllm_treespec.engine.v2.vllm_types import InputBatch
    from vllm_treespec.proposers import Proposer, ProposerInputs
    from vllm_treespec.step.drafting import Start
    from vllm_treespec.trees.draft import Draft
    from vllm_treespec.trees.tree import TreeBatch


@dataclass(frozen=True)
class DraftGraph(BatchExecutionDescriptor):
    """Which graph draws trees of a shape, or verifies them."""

    shape: TreeShape | ScoreShape | None = None

    @classmethod
    def of(cls, shape: TreeShape | ScoreShape) -> DraftGraph:
        """The graph of a shape."""
        trees = shape.trees if isinstance(shape, ScoreShape) else shape
        return cls(CUDAGraphMode.FULL, trees.num_trees, trees.num_trees, shape=shape)


class DraftGraphs(CudaGraphManager):
    """CUDA graphs that draw and verify trees, captured as vLLM captures the target."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        device: torch.device,
        trees: CapturedTrees,
        scores: CapturedScores,
    ) -> None:
        """Capture nothing yet."""
        self.trees = trees
        self.scores = scores
        super().__init__(vllm_config, device, CUDAGraphMode.FULL, decode_query_len=1)

    def _init_candidates(self) -> None:
        """List our graphs in the place of the target's."""
        graphs = [DraftGraph.of(shape) for shape in self.trees.shapes()]
        graphs += [DraftGraph.of(shape) for shape in self.scores.shapes()]
        self._capture_descs = {CUDAGraphMode.FULL: graphs}

    def allocate(self, max_blocks: int) -> None:
        """Make the inputs of all graphs; ``max_blocks``: columns of the block table."""
        self.trees.allocate(max_blocks)
        if self.scores.shapes():
            self.scores.allocate()

    def forward(
        self, graph: DraftGraph, warmup: bool
    ) -> Callable[[CUDAGraphMode], None]:
        """What a graph holds."""
        assert graph.shape is not None
        return partial(self._run, graph.shape)

    def _run(self, shape: TreeShape | ScoreShape, mode: CUDAGraphMode) -> None:
        if isinstance(shape, ScoreShape):
            self.scores.run(shape)
        else:
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
        captured: tuple[CapturedTrees, CapturedScores] | None,
    ) -> None:
        """Allocate the placeholders; without ``captured`` there are no graphs."""
        self.vllm_config = vllm_config
        self.device = device
        self.captured = captured
        # trees that a graph has drawn last, and their shape
        self.drawn: tuple[TreeBatch, TreeShape] | None = None
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
        if self.captured is not None and cudagraph_mode.has_full_cudagraphs():
            self.graphs = DraftGraphs(self.vllm_config, self.device, *self.captured)

    def capture(self) -> None:
        """Capture the graphs of all shapes."""
        if self.graphs is not None:
            self.graphs.allocate(self.max_blocks)
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
        draft = trees.drawn(shape, len(inputs.root_token_ids))
        self.drawn = draft.tree, shape
        return draft

    def verify(
        self, tree: TreeBatch, target: TargetLogits, keys: np.ndarray, positions: Tensor
    ) -> ScorerOutput | None:
        """Verify drawn trees in a graph; None: no graph has drawn them as they are.

        Args:
            tree: the trees.
            target: see ``CapturedScores.fill``, as the others.
            keys: of the requests.
            positions: of the roots.

        """
        if self.graphs is None or self.drawn is None or tree is not self.drawn[0]:
            return None
        scores, shape = self.graphs.scores, ScoreShape(self.drawn[1].place)
        graph = DraftGraph.of(shape)
        if graph not in self.graphs.graphs:
            return None
        scores.fill(shape, target, keys, positions)
        self.graphs.run_fullgraph(graph)
        return scores.scored(shape, len(keys))

    def propose(
        self, input_batch: InputBatch, *inputs: object, **options: object
    ) -> Tensor:
        """Placeholders, int64 [num_reqs, num_drafts]."""
        return self.placeholders[: input_batch.num_reqs]
