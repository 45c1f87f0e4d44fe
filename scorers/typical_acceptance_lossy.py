"""Typical acceptance, Medusa's rule, which is lossy."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from vllm_treespec.scorers.base import Rule, ScorerOutput, TargetLogits, empty_path
from vllm_treespec.trees.tree import TreeBatch, first_child


@dataclass(frozen=True)
class TypicalAcceptance:
    """Lossy: accepts what the target finds plausible, and emits no random token.

    arXiv 2401.10774, section 2.3.1: a token is typical when its target probability is
    above min(epsilon, delta * exp(-entropy)), entropy (in nats) of the target's
    distribution at its parent. The longest path of typical tokens is accepted, the
    first in node order among equals. One token follows: the target's most likely one,
    because there the first token of a step is greedy and always accepted, and it is
    the same token. Section 3.3.2 sets delta to the square root of epsilon, say 0.3
    and 0.09; arXiv 2403.09919 prints these two the other way round, and then epsilon
    has no effect.
    """

    # hard threshold
    epsilon: float
    # weight of the entropy-dependent threshold
    delta: float

    @property
    def rule(self) -> Rule:
        """This rule at its two thresholds; it has no batched form."""
        return Rule("typical_acceptance_lossy", self.walk, lossy=True)

    def walk(
        self, tree: TreeBatch, target: TargetLogits, uniforms: Tensor
    ) -> ScorerOutput:
        """Accept each request's longest typical path.

        Args:
            tree: drafts; ``draws`` is not used.
            target: the target's logits at the nodes.
            uniforms: not used; part of every rule's signature.

        """
        accepted = self.typical(tree, target)
        path = empty_path(tree)
        for depth in range(1, path.shape[1] + 1):
            above = accepted.gather(1, tree.parents.clamp(min=0))
            accepted &= above | (tree.depths != depth)
        reqs = torch.arange(tree.num_reqs, device=path.device)
        num_accepted = (tree.depths * accepted).amax(dim=1)
        deepest = accepted & (tree.depths == num_accepted[:, None])
        last = deepest.int().argmax(dim=1)
        node = last
        for depth in range(path.shape[1], 0, -1):
            on_path = num_accepted >= depth
            path[on_path, depth - 1] = node[on_path]
            node = torch.where(on_path, tree.parents[reqs, node], node)
        return ScorerOutput(path, num_accepted, target.argmax(reqs, last))

    def typical(self, tree: TreeBatch, target: TargetLogits) -> Tensor:
        """Which nodes hold typical tokens, bool [num_reqs, max_nodes]; roots do."""
        reqs, inner = (first_child(tree) >= 0).nonzero(as_tuple=True)
        probs = target.probs(reqs, inner)
        entropy = torch.special.entr(probs).sum(dim=-1)
        threshold = (self.delta * torch.exp(-entropy)).clamp(max=self.epsilon)

        row = torch.zeros_like(tree.parents)
        row[reqs, inner] = torch.arange(len(reqs), device=row.device)
        row = row.gather(1, tree.parents.clamp(min=0))
        is_typical = torch.zeros_like(tree.is_node())
        is_typical[:, 0] = True
        req, child = (tree.parents >= 0).nonzero(as_tuple=True)
        parent_row = row[req, child]
        prob = probs[parent_row, tree.token_ids[req, child]]
        is_typical[req, child] = prob > threshold[parent_row]
        return is_typical
