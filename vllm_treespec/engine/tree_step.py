"""The trees of the running step, and where their rows lie among the target's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from vllm_treespec.engine.branches import BatchLayout, BranchPlan
from vllm_treespec.scorers import ScorerOutput
from vllm_treespec.tree import TreeBatch


@dataclass
class TreeStep:
    """The trees that the target scores in the running step."""

    # int64 [num_trees], batch index of each tree's request, ascending
    reqs: Tensor
    tree: TreeBatch
    # index of the schedule's tree that they were drawn as
    scheduled: int
    layout: BatchLayout
    # None when every tree is a chain
    plan: BranchPlan | None = None
    scored: ScorerOutput | None = None


def first_rows(cu_num_sampled_tokens: Tensor) -> Tensor:
    """Logits row of every request's root, int64 [num_reqs]."""
    return torch.nn.functional.pad(cu_num_sampled_tokens, (1, 0))[:-1].long()


def last_rows(step: TreeStep | None, spec_decode_metadata: Any, reqs: Tensor) -> Tensor:
    """Row among the sampled ones from which a request's last token was emitted.

    Args:
        step: the step's trees, if any.
        spec_decode_metadata: vLLM's; None when no request had drafts.
        reqs: int64 [n], batch indices of the requests.

    Returns:
        int64 [n]: the row of the last accepted node, of the root without a tree.

    """
    if spec_decode_metadata is None:
        return reqs
    rows = first_rows(spec_decode_metadata.cu_num_sampled_tokens)
    if step is not None:
        assert step.scored is not None
        rows[step.reqs] += step.scored.last_node()
    return rows[reqs]
