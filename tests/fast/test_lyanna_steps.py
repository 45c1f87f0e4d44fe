"""Whole steps over chains, with a fake engine: what is left over, read late, or lost.

That answers are those of plain decoding, and every key and value the right one, is in
``test_decoder.py``. The toy head checks by itself that each level that is left is the
request's own, at its own place.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.fast.toy_chains import ToyChainHead
from tests.fast.toy_workloads import make_engine, make_method
from tests.tiers import grid
from vllm_treespec.proposers import DynamicTree, Lyanna
from vllm_treespec.schedule.listed import ListedSchedule
from vllm_treespec.sources.base import Sources
from vllm_treespec.sources.chain import ChainMemory
from vllm_treespec.testing.fake_engine import FakeEngine
from vllm_treespec.testing.fake_scheduler import Habits, Request
from vllm_treespec.testing.toy_models import Language
from vllm_treespec.testing.workloads import HABITS, check_greedy, workload

MODES = ("lyanna_replace", "lyanna_merge")


def head_of(engine: FakeEngine) -> ToyChainHead:
    """The engine's one source."""
    (source,) = engine.decoder.sources.models
    assert isinstance(source, ToyChainHead)
    return source


@pytest.mark.parametrize(
    ("name", "habits"),
    grid(
        MODES,
        ["whole", "all"],
        quick=lambda name, habits: (habits == "all") == (name == "lyanna_replace"),
    ),
)
def test_leftovers_are_drafted_and_accepted(name: str, habits: str) -> None:
    """Red when nothing is left over any more, or it is not counted."""
    engine = make_engine(name, HABITS[habits])
    check_greedy(engine, workload(0))
    head, counted = head_of(engine), engine.decoder.stats.as_dict()
    assert set(head.num_left) >= {1, 2}
    assert 0 < counted["leftover_accepted"] < counted["leftover_nodes"]
    assert counted["leftover_nodes"] < counted["nodes"] - counted["trees"]
    if name == "lyanna_merge":
        assert head.num_unread == 0
    else:
        assert 0.2 < head.num_unread / head.num_drafted < 0.8


def test_a_request_reads_later_what_it_did_not_read() -> None:
    """Red when a leftover waits for pairs, or a fresh chain runs before they are read.

    The toy head checks all keys and values up to the pairs that it reads.
    """
    engine = make_engine("lyanna_replace", Habits())
    request = Request("a", [1, 2, 3, 4, 5], 40)
    engine.add(request)
    head = head_of(engine)
    unread = 0
    waited = []
    while engine.scheduler.waiting or engine.scheduler.running:
        before = len(head.num_read), head.num_unread, len(request.token_ids)
        engine.step()
        new = len(request.token_ids) - before[2]
        if head.num_unread > before[1]:
            assert len(head.num_read) == before[0], "it drafts without reading"
            unread += new
        elif len(head.num_read) > before[0] and before[0]:
            assert head.num_read[-1] == new + unread
            waited.append(unread)
            unread = 0
    assert max(waited) >= 2
    assert request.output == engine.language.greedy([1, 2, 3, 4, 5], 40)


@pytest.mark.parametrize(
    ("name", "what"),
    grid(
        MODES,
        ["lost", "other drafts", "cut"],
        quick=lambda name, what: what == "cut" or name == "lyanna_replace",
    ),
)
def test_what_came_back_decides_what_is_left(name: str, what: str) -> None:
    """Red when a tree that did not come back leaves its chain to the next one.

    A cut tree came back: its levels are counted from what was accepted of it.
    """
    habits = {
        "lost": Habits(lose=1.0),
        "other drafts": Habits(other=1.0),
        "cut": Habits(cut=1.0),
    }
    engine = make_engine(name, habits[what])
    check_greedy(engine, workload(1))
    head = head_of(engine)
    assert bool(sum(head.num_left)) == (what == "cut")
    assert engine.decoder.stats.as_dict()["trees"] == 0 or what == "cut"
    assert head.num_drafted > 20


@pytest.mark.parametrize("name", MODES)
def test_a_plain_step_drops_what_was_left(name: str) -> None:
    """Red when a chain outlives a step without trees."""
    engine = make_engine(name, Habits())
    engine.add(Request("a", [1, 2, 3], 30))
    head = head_of(engine)
    schedule = engine.decoder.method.schedule
    assert isinstance(schedule, ListedSchedule)
    (tree,) = schedule.measured
    for _ in range(6):
        tree.paused_until = 10**9
        engine.step()
        head.num_left, head.num_unread = [], 0
        tree.paused_until = 0
        engine.step()
        assert not sum(head.num_left) | head.num_unread
    engine.run()


def test_trees_of_several_depths() -> None:
    """Red when chains of one length are taken for those of another."""
    language = Language(0)
    for resample in ("replace", "merge"):
        shapes = ((3, 4, 9), (3, 2, 5), (4, 1, 4))
        proposers = [
            Lyanna(
                DynamicTree(*shape),
                DynamicTree(3, shape[1] - 1, 4)
                if resample == "merge" and shape[1] > 1
                else None,
            )
            for shape in shapes
        ]
        method = make_method(proposers, "coupled_draw", batch_sizes=(2, 4, 5))
        head = ToyChainHead(language, ChainMemory(resample, 1))
        engine = FakeEngine(
            language, method, Sources([head]), replace(HABITS["all"], cut=0.1)
        )
        check_greedy(engine, workload(4, num_reqs=14))
        assert {index for _, index in engine.drawn} == {0, 1, 2, None}
        assert max(head.num_left) == 3


def test_requests_beyond_max_trees_lose_what_was_left() -> None:
    """Red when a request that does not draft keeps a chain, or more draft than may."""
    engine = make_engine("lyanna_replace", Habits(), max_trees=2)
    check_greedy(engine, workload(3))
    assert head_of(engine).num_unread > 5
