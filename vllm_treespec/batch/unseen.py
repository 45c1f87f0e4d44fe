"""Trees that are drawn and scored before the host has seen them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch

from vllm_treespec.batch.matching import (
    PlacedTrees,
    Proposal,
    RunningTrees,
    rows_of,
    trees_in,
    without_trees,
)
from vllm_treespec.batch.views import EmittedBatch, ScheduledBatch
from vllm_treespec.host_copies import HostCopy, on_device
from vllm_treespec.trees.draft import Draft, HostDraft


@dataclass(frozen=True)
class UnseenTrees:
    """Trees that were drawn before the host knew their roots, and are not there yet.

    Each may have as many nodes as the widest.
    """

    draft: Draft
    # see ``Proposal``; the trees are those of all requests of a batch, in its order
    tree_index: int
    step: int
    slots: np.ndarray
    # whether a node may have two children
    branching: bool
    # of what a proposal has, on its way to the host
    copy: HostCopy

    @classmethod
    def from_draft(
        cls,
        draft: Draft,
        tree_index: int,
        step: int,
        slots: np.ndarray,
        branching: bool,
    ) -> UnseenTrees:
        """Send what the host will read of new trees; it does not wait."""
        copy = HostCopy(draft.host_parts(), wait=False)
        return cls(draft, tree_index, step, slots, branching, copy)

    def without(self, slots: np.ndarray) -> UnseenTrees:
        """Leave out the trees of the requests in these slots, int64 [n]."""
        return replace(self, slots=without_trees(self.slots, slots))

    @cached_property
    def seen(self) -> Proposal:
        """The trees on the host; to be read when a step that scored them is over."""
        places = self.tree_index, self.step, self.slots, np.arange(len(self.slots))
        whole = np.full(len(self.slots), self.draft.tree.max_nodes)
        host = HostDraft(**self.copy.arrived())
        proposal = Proposal.of(self.draft, host, *places, whole)
        return replace(proposal, is_filled=True)


def place_unseen(
    trees: UnseenTrees, batch: ScheduledBatch, step: int, device: torch.device
) -> PlacedTrees | None:
    """Place trees that the host has not seen; None: none of their requests runs.

    A request that runs has room for every node that its tree may have.
    """
    row = rows_of(trees.slots, batch.slots)
    came = (row >= 0) & (batch.num_drafts == trees.draft.tree.max_nodes - 1)
    reqs = np.flatnonzero(came)
    if trees.step != step - 1 or not len(reqs):
        return None
    rows = row[reqs]
    host = np.stack([reqs, rows, batch.root_rows[reqs]])
    reqs_there, rows_there, roots_there = on_device(host, device)
    return PlacedTrees(
        tree=trees_in(rows, rows_there, trees.draft.tree),
        tree_index=trees.tree_index,
        reqs=reqs_there,
        root_rows=roots_there,
        host_reqs=reqs,
        query_starts=batch.query_starts[reqs],
        slots=batch.slots[reqs],
        proposal_rows=rows,
        branching=trees.branching,
    )


def seen_trees(
    trees: PlacedTrees, proposal: Proposal, root_positions: np.ndarray
) -> RunningTrees:
    """The same trees once the host has seen them.

    Args:
        trees: of a step that is over.
        proposal: they were placed from.
        root_positions: int64 [num_trees].

    """
    rows = trees.proposal_rows
    return RunningTrees(
        **vars(trees),
        num_nodes=1 + proposal.num_drafts[rows],
        root_positions=root_positions,
        token_ids=proposal.token_ids[rows],
        parents=proposal.parents[rows],
    )


@dataclass(frozen=True)
class StepTrees:
    """The trees of a step, until it is noted what became of them."""

    batch: ScheduledBatch
    # None: it has none
    trees: PlacedTrees | None
    # what they were placed from, if they were drawn at the end of the step before
    proposal: Proposal | UnseenTrees | None

    def without_draws(self) -> StepTrees:
        """The same once it is verified: nothing reads draft distributions any more."""
        trees, proposal = self.trees, self.proposal
        if trees is not None:
            trees = replace(trees, tree=replace(trees.tree, draws=None))
        if isinstance(proposal, Proposal):
            tree = replace(proposal.tree, draws=None)
            proposal = replace(proposal, tree=tree)
        elif proposal is not None:
            tree = replace(proposal.draft.tree, draws=None)
            draft = replace(proposal.draft, tree=tree)
            proposal = replace(proposal, draft=draft)
        return replace(self, trees=trees, proposal=proposal)

    def seen(self, batch: EmittedBatch) -> SeenTrees:
        """The same on the host, once the step is over."""
        trees, proposal = self.trees, self.proposal
        if isinstance(proposal, UnseenTrees):
            proposal = proposal.seen
            if trees is not None:
                roots = batch.num_computed[trees.host_reqs]
                trees = seen_trees(trees, proposal, roots)
        assert trees is None or isinstance(trees, RunningTrees)
        return SeenTrees(self.batch, trees, proposal)


@dataclass(frozen=True)
class SeenTrees:
    """The trees of a step that is over."""

    scheduled: ScheduledBatch
    trees: RunningTrees | None
    proposal: Proposal | None

    def accepted(self, batch: EmittedBatch) -> np.ndarray:
        """Drafts accepted of each request's tree; -1 without one, int64 [num_reqs]."""
        accepted = np.full(batch.num_reqs, -1)
        if self.trees is not None:
            reqs = self.trees.host_reqs
            accepted[reqs] = batch.num_emitted[reqs] - 1
        return accepted
