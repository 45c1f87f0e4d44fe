"""Hybrid trees: what both parts hold and claim."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

import numpy as np
import pytest

from tests.fast.drafting import Path, draft_of, token_paths
from tests.fast.languages import Language, random_tables
from tests.fast.scheduled_trees import pruning_plan
from tests.fast.test_dynamic_tree import log_law
from tests.reference.proposers import dynamic_tree_reference
from vllm_treespec.batch.matching import count_by_source
from vllm_treespec.proposers import Hybrid
from vllm_treespec.proposers.suffix import grow_tree
from vllm_treespec.schedule.plan import PLAIN_PLAN, StepPlan
from vllm_treespec.sources.continuations import Continuation, Continuations
from vllm_treespec.trees.draft import Draft
from vllm_treespec.trees.source import Source


def drafted(
    proposer: Hybrid,
    found: list[list[Continuation]],
    draft: Language | None,
    plan: StepPlan = PLAIN_PLAN,
) -> Draft:
    """One tree for each request; without a draft the model does not draft."""
    return draft_of(
        proposer,
        () if draft is None else draft,
        num_reqs=len(found),
        continuations=[Continuations(found)],
        plan=plan,
    )


def found_paths(found: list[Continuation], num_drafts: int) -> list[Path]:
    """Paths of the index's tree."""
    paths: list[Path] = [()]
    for token, parent, *_ in grow_tree(found, num_drafts, num_drafts, 0.0):
        paths.append((*paths[parent], token))
    return paths[1:]


def path_probability(law: Callable[[Path], Sequence[float]], path: Path) -> float:
    """How likely a model draws a path, by its log probabilities."""
    return math.exp(sum(law(path[:depth])[path[depth]] for depth in range(len(path))))


def drafted_beside(
    index: Collection[Path],
    law: Callable[[Path], Sequence[float]],
    least: float,
    num_drafts: int,
    places: int,
) -> list[Path]:
    """What a model of three tokens drafts of a tree of two levels, the likeliest first.

    All that the index has, too, and so many others as there are places.
    """
    found = dynamic_tree_reference(law, 3, 2, num_drafts)
    ranked = sorted(found, key=lambda path: -path_probability(law, path))
    likely = [path for path in ranked if path_probability(law, path) >= least]
    alone = [path for path in likely if path not in index]
    return [path for path in likely if path in index or path in alone[:places]]


# What a tree holds

FOUND: list[Continuation] = [(5, [1, 2, 0]), (5, [1, 0]), (2, [2, 2]), (1, [0])]


@pytest.mark.parametrize(
    ("plan", "num_found", "row_cost"),
    [
        (PLAIN_PLAN, 4, 0.0),
        (pruning_plan(), 6, 0.0),
        (pruning_plan(row_cost=0.1), 5, 0.1),
        (pruning_plan(row_cost=0.3), 1, 0.3),
        (replace(pruning_plan(), max_rows=6), 4, 0.0),
    ],
    ids=["halves", "free", "cheap", "dear", "few rows"],
)
def test_the_model_gets_what_the_index_leaves(
    plan: StepPlan, num_found: int, row_cost: float
) -> None:
    """Red when a part gets other nodes than its best, or equal paths are two nodes.

    Or when what both found takes two places. In a fixed schedule each part has one
    half. Where the plan prunes, claims alone count; the model has places for a path at
    least.
    """
    draft, _ = random_tables("random", 3, 3)
    proposer = Hybrid(8, depth=3, top_k=3, model_depth=2, min_probability=0.0)
    made = drafted(proposer, [FOUND], draft, plan)
    index = found_paths(FOUND, num_found)
    law = log_law(draft)
    most = plan.max_rows or 8
    model = drafted_beside(index, law, row_cost, most, most - num_found)
    paths = token_paths(made.tree, 0)
    assert sorted(paths[1:]) == sorted({*index, *model})
    assert [path for path in paths[1:] if path in index] == index
    sources = made.on_host().sources
    assert sources is not None
    assert sources[0].tolist() == [
        Source.INDEX * (path in index) + Source.MODEL * (path in model)
        for path in paths[1:]
    ] + [0] * (9 - len(paths))
    assert made.tree.max_nodes == 9
    if plan is PLAIN_PLAN:
        assert set(index) & set(model), "no path is in both parts"
        assert count_by_source(sources[0]).tolist() == [4, 6]


def test_each_request_has_a_tree_of_its_own() -> None:
    """Red when a batch decides a request's tree, or one's ratios are another's."""
    draft, _ = random_tables("random", 3, 3)
    proposer = Hybrid(6, depth=3, top_k=2, model_depth=3, min_probability=0.0)
    found: list[list[Continuation]] = [FOUND, [], FOUND[2:], FOUND]
    pruned = pruning_plan(
        4, 0.1, kept=[1.0, 0.1, 0.6, 0.2], kept_of_model=[0.2, 1.0, 0.5, 0.9]
    )
    for plan in (pruned, PLAIN_PLAN):
        together = drafted(proposer, found, draft, plan).tree
        for req in range(4):
            alone = drafted(proposer, [found[req]], draft, plan.of_slots([req]))
            assert token_paths(alone.tree) == token_paths(together, req)


def test_each_source_claims_its_nodes() -> None:
    """Red when a node has another claim than its source's, or the index's if both.

    Or when places stay empty that the model could fill.
    """
    draft, _ = random_tables("random", 3, 3)
    proposer = Hybrid(8, depth=3, top_k=3, model_depth=2, min_probability=0.0)
    made = drafted(proposer, [FOUND, []], draft)
    by_node = made.on_host().claims
    assert by_node is not None
    assert made.levels == 2
    law = log_law(draft)
    by_index: dict[Path, float] = {}
    names: list[Path] = [()]
    for node in grow_tree(FOUND, 4, 4, 0.0):
        names.append((*names[node.parent], node.token))
        by_index[names[-1]] = node.claim
    for row, (left, found) in enumerate(((4, by_index), (8, dict[Path, float]()))):
        by_model = {
            path: path_probability(law, path)
            for path in drafted_beside(found, law, 0.0, 8, left)
        }
        expected = by_model | found
        paths, claims = token_paths(made.tree, row)[1:], by_node[row].tolist()
        assert set(paths) == expected.keys()
        assert claims[: len(paths)] == pytest.approx([expected[p] for p in paths])
        assert not any(claims[len(paths) :])


@pytest.mark.parametrize("plan", [PLAIN_PLAN, pruning_plan(2, row_cost=0.1)])
def test_without_a_model_the_tree_is_the_indexs(plan: StepPlan) -> None:
    """Red when places of the model stay empty in a step without it."""
    found: list[list[Continuation]] = [FOUND, []]
    proposer = Hybrid(8, depth=3, top_k=3, model_depth=2, min_probability=0.0)
    alone = drafted(proposer, found, None, plan)
    by_index = Hybrid(8, depth=3, top_k=3, model_depth=0, min_probability=0.0)
    draft, _ = random_tables("random", 3, 3)
    never = drafted(by_index, found, draft, plan)
    for one, other in zip(
        vars(alone.on_host()).values(), vars(never.on_host()).values(), strict=True
    ):
        assert np.array_equal(one, other)
    assert alone.on_host().sources is not None
    for req in range(2):
        assert token_paths(alone.tree, req) == token_paths(never.tree, req)
    num_found = 5 if plan.prunes else 7
    assert token_paths(alone.tree, 0)[1:] == found_paths(FOUND, num_found)
