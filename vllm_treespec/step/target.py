"""The target's logits in a step, with requests' penalties and forbidden tokens."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
from torch import Tensor

from vllm_treespec.batch.forbidden import leaving_out, limited_rows
from vllm_treespec.batch.matching import RunningTrees
from vllm_treespec.batch.requests import RequestSlots
from vllm_treespec.batch.views import SamplingView, ScheduledBatch
from vllm_treespec.host_copies import on_device
from vllm_treespec.sampling.penalties import PenalisedTexts, no_drafts
from vllm_treespec.scorers import TargetLogits
from vllm_treespec.trees.tree import ancestor_bits


class StepTarget:
    """Gives the logits that tokens are drawn from.

    Forbidden tokens are left out of them within a context: logprobs are of the logits
    as they were.
    """

    def __init__(self, slots: RequestSlots, max_depth: int) -> None:
        """Take what requests must not emit, and the levels of the deepest tree."""
        self.slots = slots
        self.max_depth = max_depth
        self.texts = PenalisedTexts()

    def finish_requests(self, slots: np.ndarray) -> None:
        """Forget requests that ended, by their released slots, int64 [n]."""
        self.texts.finish_requests(slots)

    @contextmanager
    def at(
        self,
        logits: Tensor,
        sampling: SamplingView,
        batch: ScheduledBatch,
        host_reqs: np.ndarray,
        reqs: Tensor,
        trees: RunningTrees | None = None,
    ) -> Iterator[TargetLogits]:
        """Logits after the roots of some requests, or after all nodes of their trees.

        Args:
            logits: [num_rows, vocab_size].
            sampling: of the requests of the batch.
            batch: the step.
            host_reqs: int64 [n], the requests' places in the batch.
            reqs: the same on the device.
            trees: of these requests; None: they have none.

        """
        slots, rows = batch.slots[host_reqs], batch.root_rows[host_reqs]
        penalties = None
        if sampling.penalties is not None:
            drafts, ancestors = no_drafts(reqs)
            if trees is not None:
                drafts = trees.token_ids[:, : trees.tree.max_nodes - 1]
                ancestors = ancestor_bits(trees.tree, self.max_depth)
            penalties = self.texts.penalties(
                sampling.penalties, host_reqs, slots, drafts, ancestors
            )
        forbidden = self.slots.forbidden(slots)
        limited = limited_rows(forbidden, host_reqs, rows, sampling.texts, trees)
        of_reqs = sampling.select(host_reqs, reqs)
        root_rows = on_device(rows, reqs.device) if trees is None else trees.root_rows
        with leaving_out(logits, limited, sampling.texts):
            yield TargetLogits(logits, root_rows, of_reqs, penalties)
