"""Hands committed tokens to the sources that read every one of them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from vllm_treespec.batch.matching import PlacedTrees, rows_of
from vllm_treespec.batch.reading import (
    ReadingPlan,
    ReadMarks,
    kv_slots,
    plan_reading,
    token_places,
)
from vllm_treespec.batch.views import EmittedBatch
from vllm_treespec.host_copies import on_device
from vllm_treespec.scorers import ScorerOutput
from vllm_treespec.sources.base import CommittedTokens, ModelSource


class CommittedReader:
    """Gives each source the tokens that it has not read, and says who may draft.

    A source that catches up reads when trees are drawn, within a budget of tokens a
    step; a request that is still behind drafts later. If it reads features it is handed
    them in every step, to keep. If it can draft from what its last trees left over, it
    may read later still. Any other source reads every step's tokens in that step.
    """

    marks: ReadMarks

    def __init__(self, sources: Sequence[ModelSource], max_num_tokens: int) -> None:
        """Take the sources, and the tokens of the largest forward."""
        self.late_sources = [
            s for s in sources if s.reads.own_kv and s.reads.catches_up
        ]
        self.step_sources = [
            s for s in sources if s.reads.every_token and s not in self.late_sources
        ]
        self.keepers = [s for s in self.late_sources if s.reads.features]
        # whether some draft from the target's hidden states at roots
        self.reads_roots = any(s.reads.root_hidden for s in sources)
        self.features = {layer for s in sources for layer in s.reads.features}
        self.max_num_tokens = max_num_tokens
        # tokens of earlier steps that late sources read in the last one
        self.num_caught_up = 0

    def bind(self, num_blocks: int, block_size: int) -> None:
        """Take the size of the KV cache."""
        self.marks = ReadMarks(num_blocks, block_size)

    @property
    def reads_every_step(self) -> bool:
        """Whether some source must be handed what each step computed."""
        return bool(self.step_sources or self.features)

    def note(
        self, batch: EmittedBatch, rows: Tensor | slice | None, num_rested: int
    ) -> None:
        """Note what the target computed in a step, before sources read.

        Args:
            batch: after the step.
            rows: query rows of the step's committed tokens, for features.
            num_rested: plain steps before it that were not noted. Fewer than a block
                has tokens, so no block was filled in them alone, and then cached.

        """
        if self.keepers:
            places = token_places(batch.num_computed, batch.end)
            slots = kv_slots(batch.blocks.host_table, *places, self.marks.block_size)
            features = self._features(batch, rows)
            for keeper in self.keepers:
                keeper.keep(slots, features)
        if self.late_sources:
            first = (batch.num_computed - num_rested).clip(min=0)
            self.marks.mark_written(batch.blocks.host_table, first, batch.end)

    def note_read(self, batch: EmittedBatch) -> None:
        """Note a step of which the sources read all tokens before it was over."""
        if self.late_sources:
            span = batch.blocks.host_table, batch.num_computed, batch.end
            self.marks.mark_written(*span)
            self.marks.mark_read(*span)

    def has_read(self, table: np.ndarray, end: np.ndarray) -> bool:
        """Whether the sources have read all tokens of requests before ``end``.

        Args:
            table: int32 [num_reqs, max_blocks].
            end: int64 [num_reqs].

        """
        if not self.late_sources:
            return True
        return np.array_equal(self.marks.first_unread(table, end), end)

    def num_behind(self, batch: EmittedBatch, reqs: np.ndarray) -> np.ndarray:
        """Tokens of earlier steps that sources must read to draft, int64 [n].

        A prompt counts: its step emits one token.

        Args:
            batch: after the step.
            reqs: int64 [n], places in the batch.

        """
        if not self.late_sources:
            return np.zeros(len(reqs), dtype=np.int64)
        end = batch.end[reqs]
        first = self.marks.first_unread(batch.blocks.host_table[reqs], end)
        return without_own_step(batch, reqs, end - first)

    def read(
        self,
        batch: EmittedBatch,
        rows: Tensor | slice | None,
        reqs: np.ndarray,
        may_draft: np.ndarray,
        accepted: np.ndarray,
        max_trees: int,
        any_trees: bool,
        max_caught_up: int | None = None,
    ) -> np.ndarray:
        """Let the sources read, after ``note``.

        Args:
            batch: after the step.
            rows: query rows of the step's committed tokens, for features.
            reqs: int64 [n], requests that draft trees in some step.
            may_draft: bool [n], which of them may draft now.
            accepted: int64 [n], see ``Roots``.
            max_trees: how many may.
            any_trees: whether this step draws trees.
            max_caught_up: tokens of earlier steps that are read; None: as many as fit.

        Returns:
            int64 [num_drafting], the requests that draft now, ascending.

        """
        drafting = reqs[may_draft][:max_trees]
        self.num_caught_up = 0
        if self.late_sources and any_trees:
            unread = may_draft & (np.cumsum(may_draft) <= max_trees)
            for source in self.late_sources:
                unread &= source.drafts_unread(batch.slots[reqs], accepted)
            others = reqs[~unread], may_draft[~unread]
            others_drafting = self._catch_up(
                batch, *others, max_trees - int(unread.sum()), max_caught_up
            )
            drafting = np.sort(np.concatenate([reqs[unread], others_drafting]))
        if self.step_sources:
            committed = self._step_tokens(batch, rows, drafting)
            for source in self.step_sources:
                source.read(committed)
        return drafting

    def _catch_up(
        self,
        batch: EmittedBatch,
        reqs: np.ndarray,
        may_draft: np.ndarray,
        max_trees: int,
        max_caught_up: int | None,
    ) -> np.ndarray:
        """Let sources read what they have not read; return who is ready to draft."""
        table, end = batch.blocks.host_table, batch.end[reqs]
        first = self.marks.first_unread(table[reqs], end)
        budget = self.max_num_tokens
        if max_caught_up is not None:
            of_step = int(batch.num_emitted[reqs].sum() + may_draft.sum())
            budget = min(budget, of_step + max_caught_up)
        is_behind = without_own_step(batch, reqs, end - first) > 0
        plan = plan_reading(reqs, first, end, may_draft, budget, max_trees, is_behind)
        self.marks.mark_read(table[plan.reqs], plan.first, plan.end)
        if len(plan.reqs):
            behind = without_own_step(batch, plan.reqs, plan.end - plan.first)
            self.num_caught_up = int(behind.sum())
            committed = committed_tokens(batch, plan)
            for source in self.late_sources:
                source.read(committed)
        return plan.reqs[plan.drafting]

    def _step_tokens(
        self, batch: EmittedBatch, rows: Tensor | slice | None, drafting: np.ndarray
    ) -> CommittedTokens:
        """All tokens that the target computed in this step and that were committed."""
        every = np.arange(batch.num_reqs)
        plan = ReadingPlan(every, batch.num_computed, batch.end, drafting)
        return committed_tokens(batch, plan, self._features(batch, rows))

    def _features(
        self, batch: EmittedBatch, rows: Tensor | slice | None
    ) -> dict[int, Tensor]:
        """Hidden states of these query rows, by layer; none without rows."""
        by_layer = batch.hidden.by_layer
        return {} if rows is None else {i: by_layer[i][rows] for i in self.features}


def without_own_step(
    batch: EmittedBatch, reqs: np.ndarray, unread: np.ndarray
) -> np.ndarray:
    """Of unread tokens those of earlier steps, int64 [n].

    Args:
        batch: after the step.
        reqs: int64 [n], places in the batch.
        unread: int64 [n].

    """
    return (unread - batch.num_emitted[reqs]).clip(min=0)


def committed_tokens(
    batch: EmittedBatch, plan: ReadingPlan, features: dict[int, Tensor] | None = None
) -> CommittedTokens:
    """The tokens of a plan, with what sources need to find their KV."""
    reqs = on_device(plan.reqs, batch.blocks.device_table.device)
    return CommittedTokens(
        token_ids=batch.token_ids,
        reqs=plan.reqs,
        slots=batch.slots[plan.reqs],
        first=plan.first,
        end=plan.end,
        drafting=plan.drafting,
        block_table=batch.blocks.device_table[reqs],
        host_table=batch.blocks.host_table[plan.reqs],
        num_blocks=batch.blocks.num_blocks[plan.reqs],
        features=features or {},
    )


def committed_rows(
    batch: EmittedBatch,
    trees: PlacedTrees | None = None,
    scored: ScorerOutput | None = None,
    node_rows: Tensor | None = None,
) -> Tensor | slice:
    """Query row of every token that a step committed, request after request.

    Of a request without a tree these are its first rows (those of drafts that were
    read as a chain are left out); of a tree the root's and the accepted nodes'.

    Args:
        batch: after the step.
        trees: of the step; with the next two, or none of them.
        scored: what was accepted of them.
        node_rows: int64 [num_trees, max_nodes], query row of every node.

    Returns:
        int64 [sum of batch.end - batch.num_computed]; a slice where no row is left
        out and there are no trees.

    """
    counts = batch.end - batch.num_computed
    if trees is None and np.array_equal(counts, batch.num_scheduled):
        return slice(int(counts.sum()))
    starts = np.cumsum(batch.num_scheduled) - batch.num_scheduled
    offsets = np.cumsum(counts) - counts
    within = np.arange(counts.sum()) - np.repeat(offsets, counts)
    host_rows = np.repeat(starts, counts) + within
    device = batch.blocks.device_table.device
    if trees is None or scored is None or node_rows is None:
        return on_device(host_rows, device)
    of_row = np.repeat(rows_of(trees.slots, batch.slots), counts)
    rows, tree, depth = on_device(np.stack([host_rows, of_row, within]), device)
    # the root, then the accepted path; rows without a tree read any
    walked = torch.nn.functional.pad(scored.path.clamp(min=0), (1, 0))
    nodes = walked[tree, depth.clamp(max=walked.shape[1] - 1)]
    return torch.where(tree < 0, rows, node_rows[tree, nodes])


def last_hidden(
    batch: EmittedBatch,
    root_rows: Tensor,
    trees: PlacedTrees | None,
    scored: ScorerOutput | None,
) -> Tensor:
    """Hidden states from which the last tokens were emitted, [num_reqs, hidden_size].

    They are those of the last accepted node, of the root without a tree.

    Args:
        batch: after the step.
        root_rows: int64 [num_reqs], row of each request's root among the logits.
        trees: of the step; with the next one, or neither.
        scored: what was accepted of them.

    """
    rows = root_rows
    if trees is not None and scored is not None:
        rows = rows.index_add(0, trees.reqs, scored.last_node())
    return batch.hidden.sampled[rows]
