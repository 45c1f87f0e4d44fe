"""Drafts of an index that are worth less than they cost are left out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from tests.fast.drafting import draft_of
from tests.fast.scheduled_trees import pruning_plan
from vllm_treespec.proposers.suffix import Suffix
from vllm_treespec.schedule.plan import StepPlan
from vllm_treespec.sources.continuations import Continuation, Continuations
from vllm_treespec.trees.draft import NO_TOKEN, Draft

# One long match, and a short one with two continuations.
LONG: list[Continuation] = [(8, [1, 2, 3, 4])]
SHORT: list[Continuation] = [(1, [5, 6]), (1, [7])]
# Of two equally likely tokens after one that matches.
SHORT_CLAIM = 0.95 * (1 - 0.8) / 2


def propose(found: Sequence[list[Continuation]], plan: StepPlan) -> Draft:
    return draft_of(
        Suffix(16, 4, 0.01),
        num_reqs=len(found),
        continuations=[Continuations(list(found))],
        plan=plan,
    )


def num_drafts(draft: Draft) -> list[int]:
    return (draft.tree.num_nodes - 1).tolist()


def claimed(draft: Draft) -> list[float]:
    """What each tree's drafts claim, and its shadow draft."""
    made = draft.on_host()
    assert made.claims is not None
    assert made.shadow_claims is not None
    return (made.claims.sum(1) + made.shadow_claims).tolist()


def test_drafts_below_their_cost_are_left_out() -> None:
    """Red when trees of one step cannot have different sizes."""
    assert num_drafts(propose([LONG, SHORT], pruning_plan(2))) == [4, 3]
    draft = propose([LONG, SHORT], pruning_plan(2, row_cost=0.3))
    assert num_drafts(draft) == [4, 0]
    by_node = draft.on_host().claims
    assert by_node is not None
    # 0.95 (1 - 0.8^8), and so on along the path
    path = [0.95 * (1 - 0.8**n) for n in (8, 9, 10, 11)]
    claims = torch.tensor(path).cumprod(0).tolist()
    assert by_node[0, :4].tolist() == pytest.approx(claims)
    assert not bool(by_node[0, 4:].any() | by_node[1].any())
    assert claimed(draft)[1] == pytest.approx(SHORT_CLAIM), "of a shadow draft"


def test_what_is_accepted_of_a_request_counts() -> None:
    """Red when a request whose claims fail gets as many drafts as others."""
    plan = pruning_plan(3, row_cost=0.3, kept=[1.0, 0.42, 4.0])
    assert num_drafts(propose([LONG, LONG, SHORT], plan)) == [4, 1, 2]


def test_few_drafts_are_not_worth_a_step_with_drafts() -> None:
    """Red when one unlikely draft costs a step all that drafts cost together."""
    plan = pruning_plan(row_cost=0.1, fixed_cost=1.5)
    assert num_drafts(propose([LONG], plan)) == [4]
    none = propose([SHORT], plan)
    assert num_drafts(none) == [0]
    assert claimed(none) == pytest.approx([SHORT_CLAIM]), "of a shadow draft"
    assert none.tree.parents.tolist() == [[-1] * 17]
    both = propose([LONG, SHORT], pruning_plan(2, row_cost=0.08, fixed_cost=1.5))
    assert num_drafts(both)[1] > 0


def test_branches_must_be_worth_what_they_cost() -> None:
    """Red when a step pays for trees where chains bring nearly as much."""
    # the second tree is a chain; without its branch the first one is
    found: list[list[Continuation]] = [[(2, [1, 2, 3]), (2, [5, 6, 7])], LONG]
    plan = pruning_plan(2, row_cost=0.05)
    whole = propose(found, plan)
    assert num_drafts(whole) == [4, 4]
    chains = propose(found, replace(plan, branch_cost=1.0))
    assert num_drafts(chains) == [2, 4]
    assert chains.tree.parents[0, :3].tolist() == [-1, 0, 1]
    assert chains.tree.token_ids[0, 1:3].tolist() == [1, 2]
    two_paths, one_path = claimed(whole)
    assert claimed(chains) == pytest.approx([two_paths / 2, one_path])
    assert num_drafts(propose(found, replace(plan, branch_cost=0.1))) == [4, 4]
    assert num_drafts(propose(found, replace(plan, fixed_cost=9.0))) == [0, 0]


def test_a_step_has_rows_for_its_likeliest_drafts() -> None:
    """Red when drafts that fit no step take its rows, or lose their parents."""
    plan = replace(pruning_plan(3, kept=[1.0, 1.0, 0.9]), max_rows=6)
    draft = propose([LONG, SHORT, LONG], plan)
    assert num_drafts(draft) == [3, 0, 3], "claims and what they are worth both count"
    wide = [[(8, [1, 2, 3]), (7, [4, 5])]]
    whole = propose(wide, pruning_plan(1)).on_host().claims
    assert whole is not None
    for rows in range(1, 6):
        cut = propose(wide, replace(pruning_plan(1), max_rows=rows))
        assert num_drafts(cut) == [rows]
        tree, size = cut.tree, 1 + rows
        depths = tree.depths[0, :size].tolist()
        parents = tree.parents[0, 1:size].tolist()
        assert [depths[p] + 1 for p in parents] == depths[1:]
        best = sorted(whole[0].tolist(), reverse=True)[:rows]
        assert claimed(cut) == pytest.approx([sum(best)])


def test_trees_without_drafts_have_shadow_drafts() -> None:
    """Red when nothing is learned of a text whose drafts all cost too much."""
    plan = pruning_plan(3, row_cost=0.9, kept=[0.9, 1.0, 1.0])
    draft = propose([LONG, SHORT, []], plan)
    assert num_drafts(draft) == [0, 0, 0]
    shadow = draft.on_host()
    assert shadow.shadow_token_ids is not None
    assert shadow.shadow_claims is not None
    assert shadow.shadow_token_ids.tolist() == [1, 7, NO_TOKEN]
    expected = [0.95 * (1 - 0.8**8), SHORT_CLAIM, 0.0]
    assert shadow.shadow_claims.tolist() == pytest.approx(expected)
    drawn = propose([LONG], pruning_plan(row_cost=0.1)).on_host()
    assert drawn.shadow_token_ids is not None
    assert drawn.shadow_claims is not None
    assert drawn.shadow_token_ids.tolist() == [NO_TOKEN], "drafts tell more"
    assert drawn.shadow_claims.tolist() == [0.0]
