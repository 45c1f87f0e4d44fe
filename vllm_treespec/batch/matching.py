"""Which trees come back in a step: identity is request slot and step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from vllm_treespec.batch.views import (
    EmittedBatch,
    ScheduledBatch,
    cut_rows,
    ragged_rows,
)
from vllm_treespec.host_copies import on_device
from vllm_treespec.trees.draft import Draft, HostDraft
from vllm_treespec.trees.source import Source
from vllm_treespec.trees.tree import TreeBatch, ancestors

# What the scheduler drafts for a request that enters the batch with one token left.
PADDING_TOKEN_ID = -1
# The slot of a proposed tree that was discarded.
NO_SLOT = -1


@dataclass(frozen=True, kw_only=True)
class Proposal(HostDraft):
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
    # int64 [num_trees], of each tree's draft nodes the first ones, which are proposed
    num_drafts: np.ndarray
    # int64 [num_trees], nodes that a tree may have, whatever was drawn
    node_limits: np.ndarray
    # that draft models read for the trees
    num_levels: int = 0
    # tokens of earlier steps that draft models read for the trees
    num_caught_up: int = 0
    # whether the target reads a row for every node that a tree may have
    is_filled: bool = False

    @classmethod
    def from_draft(
        cls,
        draft: Draft,
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
        if node_limits is None:
            node_limits = np.full(draft.tree.num_reqs, draft.tree.max_nodes)
        places = tree_index, step, slots, reqs
        return cls.of(draft, draft.on_host(), *places, node_limits, num_caught_up)

    @classmethod
    def of(
        cls,
        draft: Draft,
        host: HostDraft,
        tree_index: int,
        step: int,
        slots: np.ndarray,
        reqs: np.ndarray,
        node_limits: np.ndarray,
        num_caught_up: int = 0,
    ) -> Proposal:
        """The same of drafts that the host has read."""
        return cls(
            **vars(host),
            tree=draft.tree,
            tree_index=tree_index,
            step=step,
            slots=slots,
            reqs=reqs,
            num_drafts=np.minimum(host.num_nodes, node_limits) - 1,
            node_limits=node_limits,
            num_levels=draft.levels,
            num_caught_up=num_caught_up,
        )

    @cached_property
    def max_depth(self) -> int:
        """Levels of the deepest tree, at least 1."""
        _, depths = ancestors(self.parents, self.parents.shape[1])
        return int(depths.max(initial=1))

    def without(self, slots: np.ndarray) -> Proposal:
        """Leave out the trees of the requests in these slots, int64 [n]."""
        return replace(self, slots=without_trees(self.slots, slots))

    def is_branching(self, rows: np.ndarray, num_nodes: np.ndarray) -> bool:
        """Whether a node of these trees has two children.

        Args:
            rows: int64 [n], of the trees.
            num_nodes: int64 [n], nodes that they are cut to.

        """
        drafts = np.arange(self.parents.shape[1])
        is_draft = drafts < num_nodes[:, None] - 1
        return bool(((self.parents[rows] != drafts) & is_draft).any())

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


def rows_of(slots_of_trees: np.ndarray, slots: np.ndarray) -> np.ndarray:
    """Find the trees of requests.

    Args:
        slots_of_trees: int64 [num_trees].
        slots: int64 [n], of the requests.

    Returns:
        int64 [n], rows of the trees; -1 where a request has none.

    """
    row_of = np.full(1 + max(slots.max(), slots_of_trees.max()), -1)
    kept = np.flatnonzero(slots_of_trees != NO_SLOT)
    row_of[slots_of_trees[kept]] = kept
    return row_of[slots]


def without_trees(of_trees: np.ndarray, slots: np.ndarray) -> np.ndarray:
    """Slots of trees, those of some requests discarded."""
    return np.where(np.isin(of_trees, slots), NO_SLOT, of_trees)


@dataclass(frozen=True)
class PlacedTrees:
    """The trees that the target scores in the running step, and their places in it."""

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
    # int64 [num_trees]
    slots: np.ndarray
    # int64 [num_trees], rows of the proposal
    proposal_rows: np.ndarray
    # whether any of them may have a node with two children
    branching: bool


@dataclass(frozen=True)
class RunningTrees(PlacedTrees):
    """Trees of which the host knows all nodes."""

    # int64 [num_trees], as the trees' ``num_nodes``
    num_nodes: np.ndarray
    # int64 [num_trees], positions of the roots
    root_positions: np.ndarray
    # int64 [num_trees, max_nodes - 1], tokens and parents of the draft nodes
    token_ids: np.ndarray
    parents: np.ndarray

    def drafts(self, tree: int) -> tuple[list[int], list[int]]:
        """Tokens and parents of a tree's draft nodes."""
        drafts = slice(self.num_nodes[tree] - 1)
        tokens, parents = self.token_ids[tree, drafts], self.parents[tree, drafts]
        return tokens.tolist(), parents.tolist()


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
    in the step before. The drafts' tokens are compared as a check. Where it is not
    known what there was room for, no tree comes back.

    Args:
        proposal: the trees that were drawn last.
        batch: of the running step.
        step: number of the running step.

    """
    row = rows_of(proposal.slots, batch.slots)
    returned = (row >= 0) & (batch.num_drafts > 0) & (proposal.step == step - 1)
    returned &= batch.num_drafts < batch.room
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
    reqs_there, rows_there, limits_there, roots_there = on_device(host, device)
    rows = matched.proposal_rows
    tree = trees_in(rows, rows_there, proposal.tree)
    num_nodes = np.minimum(matched.node_limits, 1 + proposal.num_drafts[rows])
    # Draws that add no node are cut, too.
    if tree.draws is not None or (num_nodes < proposal.num_nodes[rows]).any():
        tree = tree.cut(limits_there)
    return RunningTrees(
        tree=tree,
        tree_index=proposal.tree_index,
        reqs=reqs_there,
        root_rows=roots_there,
        host_reqs=reqs,
        query_starts=batch.query_starts[reqs],
        num_nodes=num_nodes,
        root_positions=batch.root_positions[reqs],
        token_ids=proposal.token_ids[rows],
        parents=proposal.parents[rows],
        slots=batch.slots[reqs],
        proposal_rows=rows,
        branching=proposal.is_branching(rows, num_nodes),
    )


def trees_in(rows: np.ndarray, rows_there: Tensor, tree: TreeBatch) -> TreeBatch:
    """The trees in these rows, int64 [n], on the host and on the device."""
    if np.array_equal(rows, np.arange(tree.num_reqs)):
        return tree
    return tree.select(rows_there)


def count_by_source(sources: np.ndarray) -> np.ndarray:
    """Count nodes of an index, and of a model, those of both for both, int64 [2].

    Args:
        sources: int64 [n], bits of ``Source`` of each node.

    """
    bits = np.array([Source.INDEX, Source.MODEL])
    return np.asarray(((sources[:, None] & bits) > 0).sum(0))


def scored_by_source(
    trees: RunningTrees, proposal: Proposal | None, batch: EmittedBatch
) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
    """Sources of the nodes of each tree, if trees have more than one.

    Args:
        trees: of the step.
        proposal: they were cut from; None: it was discarded.
        batch: after the step.

    Yields:
        the place of the tree's request; sources of its draft nodes that were scored,
        int64 [n], and of those that were accepted, int64 [num_accepted].

    """
    if proposal is None or proposal.sources is None:
        return
    for tree, row in enumerate(trees.proposal_rows.tolist()):
        req = int(trees.host_reqs[tree])
        end = batch.num_tokens[req] - 1
        first = end + 1 - batch.num_emitted[req]
        path = proposal.path(row, batch.token_ids[req, first:end])
        sources = proposal.sources[row]
        yield req, sources[: trees.num_nodes[tree] - 1], sources[path]
