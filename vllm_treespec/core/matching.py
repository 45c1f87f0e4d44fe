"""Which trees come back in a step: identity is request slot and step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from vllm_treespec.core.tree import TreeBatch
from vllm_treespec.core.views import (
    EmittedBatch,
    ScheduledBatch,
    cut_rows,
    ragged_rows,
)

# What the scheduler drafts for a request that enters the batch with one token left.
PADDING_TOKEN_ID = -1
# The slot of a proposed tree that was discarded.
NO_SLOT = -1


@dataclass(frozen=True)
class Proposal:
    """The trees that were drawn at the end of a step, and their drafts on the host."""

    tree: TreeBatch
    # which tree of the schedule they were drawn as
    tree_index: int
    # number of the step at whose end they were drawn
    step: int
    # int64 [num_trees], the requests' slots; NO_SLOT where a tree was lost
    slots: np.ndarray
    # int64 [num_trees], their places in the batch of that step
    reqs: np.ndarray
    # int64 [num_trees, max_nodes - 1], tokens and parents of the draft nodes
    token_ids: np.ndarray
    parents: np.ndarray
    # int64 [num_trees], of each tree's draft nodes the first ones, which are proposed
    num_drafts: np.ndarray
    # int64 [num_trees], nodes that a tree may have, whatever was drawn
    node_limits: np.ndarray
    # int64 [num_trees, max_nodes - 1], see ``TreeBatch.parts``
    parts: np.ndarray | None = None
    # float64 [num_trees], see ``TreeBatch.promised``; 0 where not all is proposed
    promised: np.ndarray | None = None
    # that draft models read for the trees
    num_levels: int = 0
    # int64 [num_trees], see ``TreeBatch.guesses``
    guesses: np.ndarray | None = None
    # tokens of earlier steps that draft models read for the trees
    num_caught_up: int = 0

    @classmethod
    def from_tree(
        cls,
        tree: TreeBatch,
        tree_index: int,
        step: int,
        slots: np.ndarray,
        reqs: np.ndarray,
        node_limits: np.ndarray | None = None,
        num_caught_up: int = 0,
    ) -> Proposal:
        """Bring the drafts of new trees to the host, waiting for the device once.

        ``node_limits`` int64 [num_trees] must not depend on what was drawn; None: the
        trees are whole.
        """
        width = tree.max_nodes
        if node_limits is None:
            node_limits = np.full(tree.num_reqs, width)
        together = [tree.token_ids, tree.parents, tree.num_nodes[:, None]]
        if tree.parts is not None:
            together.append(tree.parts)
        if tree.guesses is not None:
            together.append(tree.guesses[:, None])
        if tree.promised is not None:
            together.append(tree.promised.view(torch.int64)[:, None])
        host = torch.cat(together, dim=1).cpu().numpy()
        num_nodes = np.minimum(host[:, 2 * width], node_limits)
        promised = None
        if tree.promised is not None:
            promised = host[:, -1].copy().view(np.float64)
            promised = np.where(num_nodes == host[:, 2 * width], promised, 0.0)
        return cls(
            tree,
            tree_index,
            step,
            slots,
            reqs,
            token_ids=host[:, 1:width],
            parents=host[:, width + 1 : 2 * width],
            num_drafts=num_nodes - 1,
            node_limits=node_limits,
            parts=None
            if tree.parts is None
            else host[:, 2 * width + 2 : 3 * width + 1],
            promised=promised,
            num_levels=tree.num_levels,
            guesses=None if tree.guesses is None else host[:, -2],
            num_caught_up=num_caught_up,
        )

    def without(self, slots: np.ndarray) -> Proposal:
        """Leave out the trees of the requests in these slots, int64 [n]."""
        lost = np.isin(self.slots, slots)
        return replace(self, slots=np.where(lost, NO_SLOT, self.slots))

    def rows_of(self, slots: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Find the trees of the requests in these slots, int64 [n].

        Returns:
            rows of the trees, and the places of their requests in ``slots``, int64.

        """
        _, rows, places = np.intersect1d(self.slots, slots, return_indices=True)
        return rows, places

    def path(self, row: int, token_ids: np.ndarray) -> list[int]:
        """Draft nodes, from 0, that hold these tokens one below the other.

        Args:
            row: of the tree.
            token_ids: int64 [n], from the root's child on.

        """
        path: list[int] = []
        for token in token_ids:
            above = path[-1] + 1 if path else 0
            is_child = (self.parents[row] == above) & (self.token_ids[row] == token)
            path.append(int(is_child.argmax()))
        return path

    def drafts(self) -> list[list[int]]:
        """Tokens of every tree's draft nodes."""
        return cut_rows(self.token_ids, self.num_drafts.tolist())

    def draft_parents(self) -> list[list[int]]:
        """Parents of every tree's draft nodes."""
        return cut_rows(self.parents, self.num_drafts.tolist())


@dataclass(frozen=True)
class RunningTrees:
    """The trees that the target scores in the running step."""

    tree: TreeBatch
    # which tree of the schedule they were drawn as
    tree_index: int
    # int64 [num_trees], places in the batch of the trees' requests, ascending
    reqs: Tensor
    # int64 [num_trees], row of each tree's root among the logits
    root_rows: Tensor
    # The rest is on the host: reading it from the device would make the host wait.
    # int64 [num_trees], as ``reqs``
    host_reqs: np.ndarray
    # int64 [num_trees], first query row of each tree's request
    query_starts: np.ndarray
    # int64 [num_trees], as the trees' ``num_nodes``
    num_nodes: np.ndarray
    # int64 [num_trees], positions of the roots
    root_positions: np.ndarray
    # int64 [num_trees]
    slots: np.ndarray
    # int64 [num_trees], rows of the proposal
    proposal_rows: np.ndarray


@dataclass(frozen=True)
class Match:
    """The proposed trees that come back in a step."""

    # int64 [num_trees], places in the batch, ascending
    reqs: np.ndarray
    # int64 [num_trees], rows of the proposal
    proposal_rows: np.ndarray
    # int64 [num_trees], nodes that each tree is cut to
    node_limits: np.ndarray
    # int64 [n], slots whose drafts are not those that were proposed
    differing_slots: np.ndarray


def match(proposal: Proposal, batch: ScheduledBatch, step: int) -> Match:
    """Find the trees of the step before among a batch's drafts.

    A request's drafts are (the first ones of) the tree that was proposed for its slot
    in the step before. The drafts' tokens are compared as a check.

    Args:
        proposal: the trees that were drawn last.
        batch: of the running step.
        step: number of the running step.

    """
    row_of = np.full(1 + max(batch.slots.max(), proposal.slots.max()), -1)
    if proposal.step == step - 1:
        kept = np.flatnonzero(proposal.slots != NO_SLOT)
        row_of[proposal.slots[kept]] = kept
    row = row_of[batch.slots]
    returned = (row >= 0) & (batch.num_drafts > 0)
    width = max(batch.num_drafts.max(), proposal.token_ids.shape[1])
    found = ragged_rows(batch.draft_token_ids, batch.num_drafts, width)
    proposed = np.full((len(row), width), PADDING_TOKEN_ID)
    proposed[:, : proposal.token_ids.shape[1]] = proposal.token_ids[row]
    is_draft = np.arange(width) < batch.num_drafts[:, None]
    fits = batch.num_drafts <= proposal.num_drafts[row]
    same = fits & ((found == proposed) | ~is_draft).all(axis=1)
    padded = ((found == PADDING_TOKEN_ID) & is_draft).any(axis=1)
    reqs = np.flatnonzero(returned & same)
    rows, num_drafts = row[reqs], batch.num_drafts[reqs]
    whole = num_drafts == proposal.num_drafts[rows]
    room = np.minimum(batch.room[reqs], proposal.node_limits[rows])
    return Match(
        reqs=reqs,
        proposal_rows=rows,
        node_limits=np.where(whole, room, num_drafts + 1),
        differing_slots=batch.slots[returned & ~same & ~padded],
    )


def running_trees(
    proposal: Proposal, matched: Match, batch: ScheduledBatch, device: torch.device
) -> RunningTrees | None:
    """Cut the trees that come back to what was scheduled; None without any."""
    if not len(matched.reqs):
        return None
    reqs, root_rows = matched.reqs, batch.root_rows[matched.reqs]
    host = np.stack([reqs, matched.proposal_rows, matched.node_limits, root_rows])
    on_device = torch.from_numpy(host).to(device)
    tree = proposal.tree
    if not np.array_equal(matched.proposal_rows, np.arange(tree.num_reqs)):
        tree = tree.select(on_device[1])
    query_starts = np.cumsum(batch.num_scheduled) - batch.num_scheduled
    return RunningTrees(
        tree=tree.cut(on_device[2]),
        tree_index=proposal.tree_index,
        reqs=on_device[0],
        root_rows=on_device[3],
        host_reqs=reqs,
        query_starts=query_starts[reqs],
        num_nodes=np.minimum(
            matched.node_limits, 1 + proposal.num_drafts[matched.proposal_rows]
        ),
        root_positions=batch.num_computed[reqs],
        slots=batch.slots[reqs],
        proposal_rows=matched.proposal_rows,
    )


def scored_parts(
    trees: RunningTrees, proposal: Proposal | None, batch: EmittedBatch
) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
    """Which part drafted the nodes of each tree, if trees have parts.

    Args:
        trees: of the step.
        proposal: they were cut from; None: it was discarded.
        batch: after the step.

    Yields:
        the place of the tree's request; parts of its draft nodes that were scored,
        int64 [n], and of those that were accepted, int64 [num_accepted].

    """
    if proposal is None or proposal.parts is None:
        return
    for tree, row in enumerate(trees.proposal_rows.tolist()):
        req = int(trees.host_reqs[tree])
        end = batch.num_tokens[req] - 1
        first = end + 1 - batch.num_emitted[req]
        path = proposal.path(row, batch.token_ids[req, first:end])
        parts = proposal.parts[row]
        yield req, parts[: trees.num_nodes[tree] - 1], parts[path]
