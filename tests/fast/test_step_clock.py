"""What schedules are told of whole steps: claims, shadow drafts, branches."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

from tests.fast.scheduled_trees import ConstantCosts
from tests.fast.toy_workloads import Scheduled, make_method
from vllm_treespec.proposers import RsdC, Sd
from vllm_treespec.proposers.suffix import Suffix
from vllm_treespec.schedule.listed import ListedSchedule
from vllm_treespec.schedule.plan import StepResult
from vllm_treespec.scorers import RULES
from vllm_treespec.sources.base import Sources
from vllm_treespec.sources.continuations import next_tokens
from vllm_treespec.sources.suffix_index import SuffixIndex
from vllm_treespec.step.method import Method
from vllm_treespec.testing.fake_engine import FakeEngine
from vllm_treespec.testing.fake_scheduler import Habits, Request
from vllm_treespec.testing.toy_models import Language, ToyDraftModel
from vllm_treespec.trees.source import Source


def test_shadow_drafts_are_compared_with_what_was_emitted() -> None:
    """Red when one is judged by another step's token, or by another request's."""
    language = Language(3)
    proposer = Suffix(8, depth=5, min_probability=0.0)
    dear = partial(ConstantCosts, row_cost=9.0)
    method = make_method([proposer], "coupled_draw", make_schedule=dear)
    index = SuffixIndex(depth=5, max_match=6, max_cached_tokens=0)
    engine = FakeEngine(language, method, Sources(text=index), Habits(), 0)
    prompt = [1, 2, 3, 1, 2]
    (answer,) = engine.run(Request("r", list(prompt), max_tokens=30))
    text = np.array(prompt + answer)
    expected = []
    for end in range(1 + len(prompt), len(text)):
        likely = next_tokens(index.continuations(text[:end]), 0)
        best = max(((share, t) for t, (share, _) in likely.items()), default=(0, -1))
        if best[1] >= 0:
            expected.append((best[0], int(best[1] == text[end])))
    schedule = method.schedule
    assert isinstance(schedule, ConstantCosts)
    told = [
        (claimed, accepted)
        for result in schedule.results
        for claimed, accepted in zip(
            result.claimed.get(Source.INDEX, ()),
            result.accepted.get(Source.INDEX, ()),
            strict=True,
        )
        if claimed
    ]
    assert told == [(pytest.approx(claim), accepted) for claim, accepted in expected]
    assert {accepted for _, accepted in told} == {0, 1}
    assert not any(sum(result.num_accepted) for result in schedule.results)


@pytest.mark.parametrize("factors", [[1, 1], [2, 1]])
def test_schedules_are_told_of_branches(factors: list[int]) -> None:
    """Red when chains count as trees with branches, or trees as chains."""
    language = Language(0)
    method = make_method([RsdC(factors)], "recursive_rejection")
    engine = FakeEngine(
        language, method, Sources([ToyDraftModel(language)]), Habits(), 0
    )
    told: list[float] = []

    def observe(result: StepResult) -> None:
        told.append(result.work.branches)

    method.schedule.observe = observe  # type: ignore[method-assign]
    engine.run(Request("r", [1, 2, 3], max_tokens=20))
    assert any(told) == (factors == [2, 1])
    assert not told[0], "no tree came back to the first step"


@pytest.mark.parametrize("prunes", [True, False])
def test_claims_reach_schedules_of_trees_that_prune(prunes: bool) -> None:
    """Red when a draft model's claims are lost, or reach a schedule of fixed trees."""
    language, proposer = Language(0), Sd(4)
    tree = Scheduled(1000, proposer.sizes, prunes_by_cost=prunes)
    schedule = ListedSchedule([tree])
    method = Method(schedule, [proposer], RULES["recursive_rejection"], False, 16)
    engine = FakeEngine(
        language, method, Sources([ToyDraftModel(language)]), Habits(), 0
    )
    results: list[StepResult] = []
    schedule.observe = results.append  # type: ignore[method-assign, assignment]
    engine.run(Request("r", [1, 2, 3], max_tokens=20))
    told = {
        (drafts, claimed)
        for result in results
        for drafts, claimed in zip(
            result.num_drafts,
            result.claimed.get(Source.MODEL, [0.0] * len(result.slots)),
            strict=True,
        )
    }
    assert {drafts for drafts, _ in told} == {4}
    assert all(0 < claimed < 4 for _, claimed in told) == prunes
    assert prunes or told == {(4, 0.0)}
