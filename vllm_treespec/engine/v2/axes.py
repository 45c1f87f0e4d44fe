"""Positions with several axes (M-RoPE), which vLLM's V2 runner writes late."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from torch import Tensor
from vllm.v1.worker.gpu.mm.rope import RopeState

from vllm_treespec.batch.views import TargetInputs


class TreeRopeState(RopeState):
    """vLLM's positions with several axes, among them those of nodes.

    They are written when a step's trees have been laid out, as if these were chains.
    """

    # gives the nodes of the step that begins their positions, if it has trees
    place_nodes: Callable[[], None] | None = None

    def prepare_positions(self, *args: Tensor) -> None:
        """Write the positions, then those of the step's nodes."""
        super().prepare_positions(*args)
        if self.place_nodes is not None:
            self.place_nodes()
            self.place_nodes = None


@dataclass(frozen=True)
class InputsWithAxes(TargetInputs):
    """Inputs of a target with such positions; ``positions`` has one axis."""

    rope_state: TreeRopeState

    def place_nodes(self, rows: Tensor, roots: Tensor, depths: Tensor) -> None:
        """Give the nodes of trees the positions of their depths, on every axis."""
        super().place_nodes(rows, roots, depths)
        later = TargetInputs(
            self.input_ids,
            (self.rope_state.positions,),
            self.logits_indices,
            self.batch,
        )
        self.rope_state.place_nodes = partial(later.place_nodes, rows, roots, depths)
