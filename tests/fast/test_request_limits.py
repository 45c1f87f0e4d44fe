"""Trees that requests limit keep the law, exactly, also beside others."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.fast.drawn_trees import Plan, drawn_trees, independent, paths
from tests.fast.enumeration import Scorer, Weighted, all_trees, law_error
from tests.fast.languages import Language, random_tables
from vllm_treespec.batch.matching import Proposal, match, running_trees
from vllm_treespec.batch.views import ScheduledBatch
from vllm_treespec.proposers import RsdC
from vllm_treespec.scorers import multi_round, recursive_rejection
from vllm_treespec.testing.fake_views import ints
from vllm_treespec.trees.tree import TreeBatch

EXACT = 1e-12
NOTICEABLE = 1e-3
PLENTY = 64


def come_back(
    tree: TreeBatch, node_limits: np.ndarray | None, sent: int = PLENTY, room: int = 64
) -> TreeBatch:
    """The trees as the target scores them, a step after they were drawn.

    Args:
        tree: every request's.
        node_limits: int64 [num_reqs], what the requests allow.
        sent: drafts of a request that the runner hands on.
        room: nodes of a request that the scheduler has room for.

    """
    every = np.arange(tree.num_reqs)
    proposal = Proposal.from_tree(tree, 0, 0, every, every, node_limits)
    drafts = [row[: min(sent, room - 1)] for row in proposal.drafts()]
    counts = ints(map(len, drafts))
    batch = ScheduledBatch(
        slots=every,
        num_computed=np.full(len(every), 10),
        num_scheduled=1 + counts,
        num_drafts=counts,
        draft_token_ids=ints(token for row in drafts for token in row),
        room=np.full(len(every), room),
    )
    trees = running_trees(
        proposal, match(proposal, batch, 1), batch, torch.device("cpu")
    )
    assert trees is not None
    assert trees.tree.num_reqs == tree.num_reqs
    return trees.tree


def mixed_errors(
    rule: Scorer, drawn: Weighted, target: Language, limits: list[int], room: int
) -> list[float]:
    """Errors of the law of requests with each limit, all in one batch."""
    count = drawn.tree.num_reqs
    batch = drawn.tree.select(torch.arange(count).repeat(len(limits)))
    scored = come_back(batch, np.repeat(limits, count), room=room)
    errors = []
    for i, limit in enumerate(limits):
        part = scored.select(torch.arange(i * count, (i + 1) * count))
        assert int(part.num_nodes.max()) <= min(limit, room)
        errors.append(law_error(rule, Weighted(part, drawn.weights), target))
    return errors


@pytest.mark.parametrize("room", [PLENTY, 3])
@pytest.mark.parametrize(
    ("plan", "vocab_size", "depth"),
    [(independent(3), 5, 1), (paths(2, 2), 3, 2)],
    ids=["siblings", "paths"],
)
def test_law_of_merged_trees(
    plan: Plan, vocab_size: int, depth: int, room: int
) -> None:
    """Red when it depends on merged draws which of them a limit keeps."""
    draft, target = random_tables("random", vocab_size, depth)
    drawn = drawn_trees([draft], plan)
    errors = mixed_errors(multi_round, drawn, target, [2, 3, 4, PLENTY], room)
    assert max(errors) < EXACT


@pytest.mark.parametrize("room", [PLENTY, 4])
def test_law_of_trees_without_replacement(room: int) -> None:
    """Red when a limit gives such trees another law."""
    draft, target = random_tables("random", 3, 2)
    drawn = all_trees(draft, RsdC((2, 2)))
    limits = [2, 3, 4, 5, 6, PLENTY]
    errors = mixed_errors(recursive_rejection, drawn, target, limits, room)
    assert max(errors) < EXACT


def test_limits_that_look_at_sizes_are_noticed() -> None:
    """Negative control: red when the tests above could not see a wrong limit.

    Here the first two drafts are handed on, and the worker does not know why. Trees
    that have no more, because draws repeat each other, keep their third draw.
    """
    draft, target = random_tables("random", 5, 1)
    drawn = drawn_trees([draft], independent(3))
    scored = come_back(drawn.tree, None, sent=2)
    error = law_error(multi_round, Weighted(scored, drawn.weights), target)
    assert error > NOTICEABLE
