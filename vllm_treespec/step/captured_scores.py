"""Verifies drawn trees in tensors that last, so that CUDA graphs can replay it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from vllm_treespec.host_copies import on_device
from vllm_treespec.sampling.laws import SamplingTensors
from vllm_treespec.scorers import ScorerOutput, TargetLogits
from vllm_treespec.step.captured import (
    CapturedTrees,
    Sampling,
    TreeShape,
    captured_trees,
)

if TYPE_CHECKING:
    from vllm_treespec.step.decoder import TreeDecoder


class ScoreShape(NamedTuple):
    """What one graph verifies: trees that graphs have drawn."""

    # their place
    trees: TreeShape


class CapturedScores:
    """The inputs of graphs that verify trees, what a graph runs, and what it found.

    The trees are read where the graphs that draw them leave them. Some of the requests
    are sampled. The method's rule draws nothing by the noise of the engine's sampler,
    and has a batched form.
    """

    def __init__(
        self, decoder: TreeDecoder, trees: CapturedTrees, vocab_size: int
    ) -> None:
        """Take what verifies; nothing is allocated."""
        self.decoder = decoder
        self.trees = trees
        self.vocab_size = vocab_size
        self.found: dict[ScoreShape, ScorerOutput] = {}

    def shapes(self) -> Sequence[ScoreShape]:
        """All shapes, those of the largest batches first."""
        rule = self.decoder.method.rule
        if rule.follows_noise or rule.batched is None:
            return []
        return [
            ScoreShape(shape)
            for shape in self.trees.shapes()
            if shape.sampling == Sampling.TEMPERATURE
            and self.trees.proposers[shape.proposer] in self.decoder.method.proposers
        ]

    @cached_property
    def logits(self) -> Tensor:
        """The target's, float32 [num_rows, vocab_size]; vLLM captures graphs twice."""
        most = max(proposer.sizes.max_nodes for proposer in self.trees.proposers)
        shape = self.trees.sizes[-1] * most, self.vocab_size
        return torch.zeros(shape, device=self.trees.device)

    def allocate(self) -> None:
        """Make the inputs of all graphs, and forget what was found."""
        size, device = self.trees.sizes[-1], self.trees.device
        self.keys = torch.zeros(size, dtype=torch.int64, device=device)
        self.positions = torch.zeros_like(self.keys)
        self.temperature = torch.zeros(size, device=device)
        self.found = {}

    def run(self, shape: ScoreShape) -> None:
        """Verify the trees of a shape: what a graph captures."""
        size, tree = shape.trees.num_trees, self.trees.drafts[shape.trees].tree
        proposer = self.trees.proposers[shape.trees.proposer]
        index = list(self.decoder.method.proposers).index(proposer)
        root_rows = torch.arange(size, device=self.logits.device) * tree.max_nodes
        target = TargetLogits(
            self.logits[: size * tree.max_nodes],
            root_rows,
            SamplingTensors(self.temperature[:size]),
        )
        scored = self.decoder.verifier.verify(
            index, tree, target, self.keys[:size], self.positions[:size]
        )
        if shape not in self.found:
            lasting = (torch.empty_like(part) for part in vars(scored).values())
            self.found[shape] = ScorerOutput(*lasting)
        for kept, part in zip(
            vars(self.found[shape]).values(), vars(scored).values(), strict=True
        ):
            kept.copy_(part)

    def fill(
        self,
        shape: ScoreShape,
        target: TargetLogits,
        keys: np.ndarray,
        positions: Tensor,
    ) -> None:
        """Copy what decides on a step's trees to where the graph reads it.

        Each request has a row for every node that its tree may have.

        Args:
            shape: of the trees.
            target: of the trees, without penalties; of the sampling parameters the
                temperature counts.
            keys: int64 [num_trees], of the requests.
            positions: int64 [num_trees], of the roots.

        """
        num_trees = len(keys)
        width = self.trees.drafts[shape.trees].tree.max_nodes
        nodes = torch.arange(width, device=self.logits.device)
        rows = (target.root_rows[:, None] + nodes).flatten()
        self.logits[: num_trees * width] = target.logits[rows]
        self.keys[:num_trees] = on_device(keys, self.keys.device)
        self.positions[:num_trees] = positions
        self.temperature[:num_trees] = target.sampling.temperature

    def scored(self, shape: ScoreShape, num_trees: int) -> ScorerOutput:
        """What was found of the first trees."""
        parts = vars(self.found[shape]).values()
        return ScorerOutput(*(part[:num_trees] for part in parts))


def captured(
    decoder: TreeDecoder, max_reqs: int, vocab_size: int
) -> tuple[CapturedTrees, CapturedScores] | None:
    """What graphs draw and verify; None: nothing, see ``captured_trees``.

    Args:
        decoder: with its drafter.
        max_reqs: of a step.
        vocab_size: the target's.

    """
    trees = captured_trees(decoder.drafter, max_reqs)
    if trees is None:
        return None
    return trees, CapturedScores(decoder, trees, vocab_size)
