"""The trees of the running step, and where their rows lie among the target's."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from vllm_treespec.core.tree import TreeBatch
from vllm_treespec.engine.branches import ForkSpace
from vllm_treespec.scorers import ScorerOutput


@dataclass
class TreeStep:
    """The trees that the target scores in the running step."""

    # int64 [num_trees], batch index of each tree's request, ascending
    reqs: Tensor
    tree: TreeBatch
    # index of the schedule's tree that they were drawn as
    scheduled: int
    # int64 [num_trees], row of each tree's root among the logits
    first_row: Tensor
    # known on the host, so that no step has to ask the device: int64 [num_trees], as
    # ``reqs`` and as the trees' ``num_nodes``
    host_reqs: np.ndarray
    host_num_nodes: np.ndarray
    # int64 [num_trees], positions of the roots
    host_roots: np.ndarray
    scored: ScorerOutput | None = None


class TreePlacement(Protocol):
    """Where tree nodes lie in batch and KV cache, so that attention sees trees.

    On CPU along branches, for stock kernels (``branch_placement``); on GPU in the
    requests' own slots, under masks (``mask_placement``).
    """

    def prepare(self, runner: Any) -> None:
        """Allocate what lasts, before the memory for the KV cache is measured."""

    def bind(
        self,
        runner: Any,
        kv_caches: dict[str, Tensor],
        target_layers: list[str],
        forks: ForkSpace,
    ) -> None:
        """Connect to the KV cache and the attention layers, once they are made."""

    def clear(self) -> None:
        """Forget the trees of the step before."""

    def place(self, runner: Any, step: TreeStep, logits_indices: Tensor) -> None:
        """Bring the step's nodes into place, in vLLM's input buffers too.

        Changes input ids, positions and ``logits_indices`` in place; row ``i`` of a
        request's logits stays node ``i``.
        """

    def commit(self, step: TreeStep) -> None:
        """Bring the accepted paths' KV into the requests' own slots."""


def check_attention(runner: Any, layers: Iterable[str], expected: type) -> None:
    """Check that layers have our attention.

    vLLM chooses attention once in a process; an engine that ran there before ours
    leaves its choice, and stock attention would read trees as chains.

    Raises:
        ValueError: naming the remedy.

    """
    context = runner.compilation_config.static_forward_context
    for name in layers:
        if not isinstance(context[name].impl, expected):
            raise ValueError(
                "draft trees came too late: another engine chose this process's "
                "attention; start the engine in a process of its own, or unset "
                "VLLM_ENABLE_V1_MULTIPROCESSING"
            )


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
        rows.index_add_(0, step.reqs, step.scored.last_node())
    return rows[reqs]
