"""Late binding: from the placeholders of a step to the trees that it really has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from torch import Tensor

from vllm_treespec.batch.matching import NO_SLOT, Proposal
from vllm_treespec.batch.requests import RequestSlots

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput

    from vllm_treespec.batch.unseen import StepTrees, UnseenTrees
    from vllm_treespec.batch.views import ScheduledBatch
    from vllm_treespec.engine.v2.vllm_types import AsyncOutput, InputBatch


class Emitted(NamedTuple):
    """What the requests of a step emitted, on the device."""

    # int64 [num_reqs, width], padded with -1
    token_ids: Tensor
    # int32 [num_reqs], how many
    num_tokens: Tensor
    # int64 [num_reqs, width], the node after which each was drawn; None: after roots
    nodes: Tensor | None


@dataclass
class StepInFlight:
    """A step whose tokens are on their way to the host."""

    output: AsyncOutput
    batch: InputBatch
    trees: StepTrees
    emitted: Emitted
    # the target's, [num_tokens, hidden_size]: behind its final norm, and before the
    # layers that drafters read
    hidden: Tensor
    aux_hidden: Sequence[Tensor]
    # whether the next step is as plain as this one, so that nobody waits for it
    rested: bool = False
    # whether the trees behind it were drawn before the host knew its tokens
    followed: bool = False

    @property
    def scheduled(self) -> ScheduledBatch:
        """Its requests, before the target's forward."""
        return self.trees.batch

    @property
    def rows(self) -> np.ndarray:
        """The runner's rows of the requests, int [num_reqs]."""
        return self.batch.idx_mapping_np

    @property
    def completes(self) -> np.ndarray:
        """Which requests emit a token: their prompt is complete, bool [num_reqs]."""
        end = self.scheduled.num_computed + self.scheduled.num_scheduled
        return end >= self.batch.prefill_len_np

    def found_computed(self, num_tokens: np.ndarray) -> None:
        """Correct how many tokens had their KV in the cache.

        Args:
            num_tokens: int64 [num_reqs], committed tokens before the step.

        """
        is_prefilling = self.batch.is_prefilling_np
        known = np.where(is_prefilling, self.scheduled.num_computed, num_tokens - 1)
        self.trees = replace(
            self.trees, batch=replace(self.scheduled, num_computed=known)
        )

    def wait(self) -> tuple[np.ndarray, np.ndarray]:
        """Wait for the tokens.

        Returns:
            int64 [num_reqs, width]; how many each request emitted, int64 [num_reqs].

        """
        self.output.copy_event.synchronize()
        counts = self.output.num_sampled_tokens_np.astype(np.int64)
        return self.output.sampled_token_ids, counts


def by_request(
    proposal: Proposal | UnseenTrees, of_trees: Sequence[list[int]], slots: RequestSlots
) -> dict[str, list[int]]:
    """What belongs to each proposed tree that was not discarded, by request."""
    return {
        slots.name(slot): of_tree
        for slot, of_tree in zip(proposal.slots.tolist(), of_trees, strict=True)
        if slot != NO_SLOT
    }


def drafts_of(
    drawn: Proposal | UnseenTrees | None, slots: RequestSlots
) -> dict[str, list[int]]:
    """Draft tokens of each request's tree; of unseen trees as many placeholders."""
    if drawn is None:
        return {}
    if isinstance(drawn, Proposal):
        return by_request(drawn, drawn.drafts(), slots)
    placeholders = [-1] * (drawn.draft.tree.max_nodes - 1)
    return by_request(drawn, [placeholders] * len(drawn.slots), slots)


def trim(
    scheduled: SchedulerOutput, drafts: Mapping[str, Sequence[int]], fill: int
) -> SchedulerOutput:
    """Leave of each request's placeholders as many as its tree has drafts.

    The scheduler subtracts its placeholders less the accepted drafts, the device the
    remaining rows less the accepted ones: both come to the same number.

    Args:
        scheduled: with placeholders for the largest trees.
        drafts: of each request, at most as many as it has placeholders.
        fill: placeholders that remain at least, with drafts in them or not.

    """
    reserved = scheduled.scheduled_spec_decode_tokens
    if not reserved:
        return scheduled
    num_tokens = dict(scheduled.num_scheduled_tokens)
    remaining = {}
    for req_id, placeholders in reserved.items():
        kept = placeholders[: max(len(drafts.get(req_id, ())), fill)]
        num_tokens[req_id] -= len(placeholders) - len(kept)
        if kept:
            remaining[req_id] = kept
    return replace(
        scheduled,
        scheduled_spec_decode_tokens=remaining,
        num_scheduled_tokens=num_tokens,
        total_num_scheduled_tokens=sum(num_tokens.values()),
    )
