"""Verifies the trees of a step."""

from __future__ import annotations

import torch
from torch import Tensor

from vllm_treespec.batch.matching import RunningTrees
from vllm_treespec.batch.requests import RequestSlots
from vllm_treespec.batch.views import SamplingView, ScheduledBatch
from vllm_treespec.host_copies import on_device
from vllm_treespec.sampling.uniforms import SCORING, Numbers, keyed_uniforms, noise_keys
from vllm_treespec.scorers import ScorerOutput, TargetLogits, score
from vllm_treespec.step.method import Method
from vllm_treespec.step.target import StepTarget
from vllm_treespec.trees.sizes import TreeSizes
from vllm_treespec.trees.tree import TreeBatch


class TreeVerifier:
    """Applies the method's rule to the target's logits."""

    def __init__(self, method: Method, slots: RequestSlots, sizes: TreeSizes) -> None:
        """Take the method, its requests, and the sizes of its largest tree."""
        self.method = method
        self.slots = slots
        self.sizes = sizes
        self.target = StepTarget(slots, sizes.max_depth)

    def score(
        self,
        trees: RunningTrees,
        batch: ScheduledBatch,
        logits: Tensor,
        sampling: SamplingView,
    ) -> ScorerOutput:
        """Verify the trees of a step.

        Args:
            trees: of the step.
            batch: the step.
            logits: [num_rows, vocab_size]; row i of a request is node i.
            sampling: of the requests of the batch.

        """
        reqs = trees.host_reqs, trees.reqs
        keys, positions = self.slots.keys(trees.slots), trees.root_positions
        with self.target.at(logits, sampling, batch, *reqs, trees) as target:
            return self.verify(trees.tree_index, trees.tree, target, keys, positions)

    def verify(
        self,
        index: int,
        tree: TreeBatch,
        target: TargetLogits,
        keys: Numbers,
        root_positions: Numbers,
    ) -> ScorerOutput:
        """Verify trees that were drawn as the schedule's tree of this index.

        Args:
            index: in the schedule.
            tree: the trees.
            target: the target's logits at the nodes.
            keys: int64 [num_trees], of the requests, anywhere.
            root_positions: int64 [num_trees], anywhere.

        """
        numbers = torch.empty((len(keys), 0))
        if not target.sampling.all_greedy:
            there = on_device(root_positions, target.logits.device)
            numbers = self.numbers(keys, there)
        sizes = self.method.proposers[index].sizes if self.method.batched else None
        return score(tree, target, numbers, self.method.rule, sizes)

    def numbers(self, keys: Numbers, root_positions: Tensor) -> Tensor:
        """Random numbers of the method's rule; ``root_positions`` on the device."""
        if self.method.rule.follows_noise:
            return noise_keys(keys, root_positions, 1 + self.sizes.max_depth)
        count = 1 + self.sizes.max_draws
        return keyed_uniforms(keys, root_positions, SCORING, count)
