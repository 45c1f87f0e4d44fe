"""Draws and scores trees once before requests come, so that their memory is measured.

vLLM gives to the KV cache what its own profiling run leaves over. Distributions over
a large vocabulary, one a node, would not fit any more.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from vllm_treespec.core.sampling import SamplingTensors
from vllm_treespec.engine.v1.drafter import TreeDrafter
from vllm_treespec.proposers import DraftModel, ProposerInputs
from vllm_treespec.scorers import TargetLogits


@dataclass(frozen=True)
class IdleModel:
    """A draft model that finds all tokens alike; implements ``DraftModel``."""

    num_reqs: int
    vocab_size: int
    device: torch.device
    vocabulary: None = None

    def root_logits(self) -> Tensor:
        """Logits below the roots, [num_reqs, vocab_size]."""
        return torch.zeros((self.num_reqs, self.vocab_size), device=self.device)

    def extend(self, token_ids: Tensor, parents: Tensor) -> Tensor:
        """Logits below a level, [num_reqs, width, vocab_size]."""
        shape = (*token_ids.shape, self.vocab_size)
        return torch.zeros(shape, device=self.device)


@torch.inference_mode()
def rehearse(
    drafter: TreeDrafter,
    num_reqs: int,
    vocab_size: int,
    hidden: Tensor,
) -> None:
    """Draw and score every tree of the schedule for as many requests as may draft.

    Args:
        drafter: with its head loaded.
        num_reqs: how many.
        vocab_size: the target's.
        hidden: [num_reqs, hidden_size], what a head would draft from.

    """
    device = hidden.device
    # top-p sorts, which takes the most memory
    sampling = SamplingTensors(
        torch.ones(num_reqs, device=device),
        top_p=torch.full((num_reqs,), 0.9, device=device),
        all_random=True,
    )
    model: DraftModel = IdleModel(num_reqs, vocab_size, device)
    roots = torch.zeros(num_reqs, dtype=torch.int64, device=device)
    for scheduled, proposer in enumerate(drafter.proposers):
        if proposer.needs_token_ids:
            continue
        num_uniforms = max(proposer.sizes.num_uniforms, 1 + drafter.max_draws)
        uniforms = torch.rand(
            (num_reqs, num_uniforms), dtype=torch.float64, device=device
        )
        if drafter.head is not None:
            model = drafter.head.head.draft(hidden, roots)
        inputs = ProposerInputs(
            roots,
            sampling,
            uniforms[:, : proposer.sizes.num_uniforms],
            [model] * proposer.num_draft_models,
        )
        tree = proposer.propose(inputs)
        logits = torch.zeros((num_reqs * tree.max_nodes, vocab_size), device=device)
        first_row = torch.arange(num_reqs, device=device) * tree.max_nodes
        target = TargetLogits(logits, first_row, sampling)
        drafter.score(scheduled, tree, target, uniforms)
