"""A source that reads features gets those of all committed tokens, each once."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.fast.features_toy import LAYERS, FeatureSums, SumTree, true_drafts
from tests.fast.interpreted import interpreted
from tests.fast.toy_workloads import make_method
from tests.tiers import grid
from vllm_treespec.kernels import kv_move
from vllm_treespec.sources.base import Sources
from vllm_treespec.testing.fake_engine import FakeEngine
from vllm_treespec.testing.fake_scheduler import Habits
from vllm_treespec.testing.toy_models import Language, hidden_state
from vllm_treespec.testing.workloads import HABITS, workload

# Steps of more requests are plain.
MAX_RUNNING, PLAIN_ABOVE = 6, 5


def make_engine(
    source: FeatureSums,
    language: Language,
    habits: Habits,
    *,
    width: int = 2,
    max_trees: int = 16,
    masks: bool = False,
) -> FakeEngine:
    """An engine with this one source."""
    sizes = [PLAIN_ABOVE]
    method = make_method([SumTree(width)], "coupled_draw", sizes, max_trees=max_trees)
    engine = FakeEngine(language, method, Sources([source]), habits, masks=masks)
    source.bind(habits.num_blocks)
    return engine


def check_handed(
    engine: FakeEngine, source: FeatureSums, read_to: dict[str, int]
) -> None:
    """Check what a step handed over; ``read_to`` is where each request stands."""
    requests, joined = engine.now.requests, engine.plan.new + engine.plan.resumed
    slots = engine.decoder.slots.lookup([request.name for request in requests])
    assert [handed.slot for handed in source.handed] == slots.tolist()
    begins = engine.decoder.batch.num_computed.tolist()
    for request, handed, begin in zip(requests, source.handed, begins, strict=True):
        if request not in joined:
            assert begin == read_to[request.name]
        assert (handed.first, handed.end) == (begin, request.num_computed)
        ends = range(handed.first + 1, handed.end + 1)
        for layer in LAYERS:
            expected = [hidden_state(request.token_ids[:end], layer) for end in ends]
            assert handed.features[layer].tolist() == expected
        read_to[request.name] = handed.end


def check_drafts(engine: FakeEngine) -> int:
    """Check that drafts are those of the true sums; return how many trees."""
    (proposer,) = engine.decoder.method.proposers
    width = proposer.sizes.max_width
    proposed = [r for r in engine.now.requests if r.proposed_in == engine.decoder.step]
    for request in proposed:
        drafts = true_drafts(engine.language, request.token_ids, width)
        assert request.proposed == drafts
    return len(proposed)


@pytest.mark.parametrize(
    ("habits", "by_slot"),
    grid(
        HABITS,
        [False, True],
        quick=lambda habits, by_slot: habits == "all" or (habits == "late" and by_slot),
    ),
)
def test_every_committed_token_is_handed_once(habits: str, by_slot: bool) -> None:
    """Red when a feature is missing, comes twice, or is a rejected node's.

    In plain steps too, of requests that never draft, and again after preemption.
    """
    language = Language(0)
    source = FeatureSums(language, by_slot)
    # Who keeps sums by slot never hears of tokens found in the prefix cache.
    own = replace(HABITS[habits], share=not by_slot, max_running=MAX_RUNNING)
    engine = make_engine(source, language, own)
    requests = workload(0, num_reqs=14)
    for request in requests[::4]:
        request.drafts = False
    answers = [
        language.greedy(request.token_ids, request.max_tokens) for request in requests
    ]
    engine.add(*requests)
    read_to: dict[str, int] = {}
    num_trees = 0
    while engine.scheduler.waiting or engine.scheduler.running:
        engine.step()
        if engine.plan.scheduled:
            check_handed(engine, source, read_to)
            num_trees += check_drafts(engine)
    assert [request.output for request in requests] == answers
    assert num_trees > 20
    if habits == "whole":
        assert {index for _, index in engine.drawn} == {0, None}, "no step was plain"
    assert set(engine.accepted) == {0, 1, 2}
    if by_slot:
        engine.decoder.finish_requests(engine.decoder.slots.release(list(read_to)))
        assert not source.by_slot, "ended requests are kept"


@pytest.mark.parametrize(("width", "masks"), [(1, False), (2, True)])
def test_other_layouts_and_chains(width: int, masks: bool) -> None:
    """Red when a layout says a wrong row for a node."""
    language = Language(2)
    source = FeatureSums(language)
    habits = replace(HABITS["all"], max_running=PLAIN_ABOVE)
    engine = make_engine(source, language, habits, width=width, masks=masks)
    engine.add(*workload(2))
    read_to: dict[str, int] = {}
    with interpreted(kv_move):
        while engine.scheduler.waiting or engine.scheduler.running:
            engine.step()
            if engine.plan.scheduled:
                check_handed(engine, source, read_to)
                check_drafts(engine)
    assert set(engine.accepted) == {0, 1, 2}


def test_more_requests_than_trees() -> None:
    """Red when requests that wait for a tree are left out of the features."""
    language = Language(1)
    source = FeatureSums(language)
    engine = make_engine(source, language, Habits(max_running=5), max_trees=2)
    engine.add(*workload(1))
    read_to: dict[str, int] = {}
    while engine.scheduler.waiting or engine.scheduler.running:
        engine.step()
        check_handed(engine, source, read_to)
        assert check_drafts(engine) <= 2
