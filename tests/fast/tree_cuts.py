"""Trees as they come back in a step: cut by room or limits, beside lost ones."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import torch

from tests.fast.drafting import draws_of
from tests.fast.enumeration import Weighted
from vllm_treespec.batch.matching import Proposal, match, running_trees
from vllm_treespec.batch.views import ScheduledBatch
from vllm_treespec.testing.fake_views import ints
from vllm_treespec.trees.draft import Draft

PLENTY = 64
NOBODY = ints([])


def come_back(
    drawn: Weighted,
    *,
    node_limits: np.ndarray | None = None,
    sent: int = PLENTY,
    room: int = PLENTY,
    lost: np.ndarray = NOBODY,
    late: np.ndarray = NOBODY,
) -> Weighted:
    """The trees as the target scores them, a step after they were drawn.

    Args:
        drawn: every request's tree.
        node_limits: int64 [num_reqs], what the requests allow.
        sent: drafts of a request that the runner hands on.
        room: nodes of a request that the scheduler has room for.
        lost: slots of requests whose trees are discarded.
        late: slots of requests that are left out of the step.

    """
    every = np.arange(drawn.tree.num_reqs)
    proposal = Proposal.from_draft(Draft(drawn.tree), 0, 0, every, every, node_limits)
    proposal = proposal.without(lost)
    drafts = [row[: min(sent, room - 1)] for row in proposal.drafts()]

    def batch(slots: np.ndarray) -> ScheduledBatch:
        counts = ints(len(drafts[slot]) for slot in slots)
        return ScheduledBatch(
            slots=slots,
            num_computed=np.full(len(slots), 10),
            num_scheduled=1 + counts,
            num_drafts=counts,
            draft_token_ids=ints(t for slot in slots for t in drafts[slot]),
            room=np.full(len(slots), room),
            num_rows=1 + counts,
        )

    if len(late):
        assert not len(match(proposal, batch(late), 2).reqs), "a late tree came back"
    here = batch(np.setdiff1d(every, late))
    trees = running_trees(proposal, match(proposal, here, 1), here, torch.device("cpu"))
    assert trees is not None
    return Weighted(trees.tree, drawn.weights[trees.proposal_rows])


def repeated(drawn: Weighted, number: int) -> Weighted:
    """The trees so many times, one set after another."""
    rows = torch.arange(drawn.tree.num_reqs).repeat(number)
    return Weighted(drawn.tree.select(rows), drawn.weights[rows])


def cut_by(cut: str, drawn: Weighted) -> Iterator[Weighted]:
    """The trees in all the ways in which they may be cut so."""
    count, widest = drawn.tree.num_reqs, drawn.tree.max_nodes
    if cut == "room":
        for room in range(2, widest + 1):
            yield come_back(drawn, room=room)
        return
    if cut == "limits":
        # Requests with each limit side by side, with and without room for it.
        for room, limits in ((PLENTY, (2, 3, widest - 1, PLENTY)), (4, (3, PLENTY))):
            batch = repeated(drawn, len(limits))
            scored = come_back(batch, node_limits=np.repeat(limits, count), room=room)
            for i, limit in enumerate(limits):
                rows = torch.arange(i * count, (i + 1) * count)
                part = Weighted(scored.tree.select(rows), drawn.weights)
                assert int(part.tree.num_nodes.max()) <= min(limit, room)
                yield part
        return
    batch, first = repeated(drawn, 2), np.arange(count)
    lost, late = (first, NOBODY) if cut == "lost" else (NOBODY, first)
    gone = come_back(batch, lost=lost, late=late)
    assert gone.tree.num_reqs == count
    yield gone


# Wrong on purpose


def by_value(drawn: Weighted, lost: int) -> Weighted:
    """Cut trees whose first draft is token 0 to ``lost`` nodes."""
    return drawn.cut(torch.where(drawn.tree.token_ids[:, 1] == 0, lost, PLENTY))


def at_a_size(drawn: Weighted) -> Weighted:
    """Cut the trees that have more than three nodes."""
    return drawn.cut(torch.where(drawn.tree.num_nodes <= 3, PLENTY, 3))


def at_its_size(drawn: Weighted) -> Weighted:
    """Cut no node, but the draws that would have come behind the last one."""
    return drawn.cut(drawn.tree.num_nodes)


def keeps_draws(drawn: Weighted) -> Weighted:
    """Cut a tree whose nodes were chosen by draws below them, and keep its draws."""
    draws = replace(draws_of(drawn.tree), min_nodes=0)
    return Weighted(replace(drawn.tree, draws=draws), drawn.weights).cut(3)
