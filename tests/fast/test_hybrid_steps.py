"""Whole steps of hybrid trees: when the model drafts, and what schedules learn."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from tests.fast.scheduled_trees import ConstantCosts
from tests.fast.toy_workloads import make_engine
from tests.tiers import grid
from vllm_treespec.schedule.base import Schedule
from vllm_treespec.schedule.listed import ListedSchedule
from vllm_treespec.schedule.plan import RunningRequests, StepPlan
from vllm_treespec.schedule.scheduler import AdaptiveScheduler
from vllm_treespec.sources.continuations import Continuations
from vllm_treespec.sources.suffix_index import SuffixIndex
from vllm_treespec.testing.fake_engine import FakeEngine
from vllm_treespec.testing.fake_scheduler import Habits, Request
from vllm_treespec.testing.toy_models import ToyDraftModel
from vllm_treespec.testing.workloads import HABITS, check_greedy, workload
from vllm_treespec.trees.source import Source

HEADS = ("hybrid_head", "hybrid_pairs", "hybrid_chains")


def model_of(engine: FakeEngine) -> ToyDraftModel:
    source = engine.decoder.sources.models[0]
    assert isinstance(source, ToyDraftModel)
    return source


PRUNED = partial(ConstantCosts, row_cost=0.05, level_cost=0.3)


@pytest.mark.parametrize(
    ("make_schedule", "name", "habits"),
    grid(
        [ListedSchedule, PRUNED],
        HEADS,
        ["whole", "all"],
        quick=lambda made, name, habits: (
            habits == "all" and (made is PRUNED) == (name != "hybrid_head")
        ),
    ),
)
def test_heads_beside_an_index(
    make_schedule: Callable[..., Schedule], name: str, habits: str
) -> None:
    """Red when a head beside an index reads another request's text or states."""
    engine = make_engine(name, HABITS[habits], make_schedule=make_schedule)
    check_greedy(engine, workload(0))
    counted = engine.decoder.stats.as_dict()
    assert all(counted["source_accepted"].values())


# A greedy toy goes round in a circle sooner or later.
LONG = Request("a", [1, 2, 3], 150)
ROOMY = Habits(max_model_len=200, num_blocks=200)


def run_long(engine: FakeEngine) -> tuple[int, int]:
    """Steps in which the model read, and trees that were drawn, of a long answer."""
    request = replace(LONG, token_ids=list(LONG.token_ids))
    check_greedy(engine, [request])
    model = model_of(engine)
    return len(model.num_read), sum(index is not None for _, index in engine.drawn)


@pytest.mark.parametrize("name", ["hybrid", "hybrid_pairs"])
def test_no_forward_runs_where_the_index_does_as_well(name: str) -> None:
    """Red when a forward of the model runs whose tokens are not worth it.

    The toy model checks that it reads later what it has missed.
    """
    engine = make_engine(name, ROOMY, make_schedule=PRUNED)
    num_read, num_drawn = run_long(engine)
    assert num_read < 0.8 * num_drawn
    num_read, num_drawn = run_long(make_engine(name, ROOMY))
    assert num_read >= num_drawn


def counted_lookups(engine: FakeEngine) -> list[int]:
    """Let an engine's index write down how many requests it looks up each time."""
    index = engine.decoder.sources.text
    assert isinstance(index, SuffixIndex)
    look_up, counts = index.look_up, []

    def counted(texts: Sequence[np.ndarray]) -> Continuations:
        counts.append(len(texts))
        return look_up(texts)

    index.look_up = counted  # type: ignore[method-assign]
    return counts


def test_an_index_is_looked_up_once_a_step() -> None:
    """Red when it is looked up to decide on the model, and again to draft."""
    engine = make_engine("hybrid", ROOMY, make_schedule=PRUNED)
    counts = counted_lookups(engine)
    _, num_drawn = run_long(engine)
    assert counts == [1] * num_drawn


@pytest.mark.parametrize("max_trees", [1, 2])
def test_others_draft_where_the_first_must_still_be_read(max_trees: int) -> None:
    """Red when a tree is drawn from what another request's index found."""
    engine = make_engine(
        "hybrid",
        replace(HABITS["all"], token_budget=8),
        max_trees=max_trees,
        make_schedule=ConstantCosts,
    )
    counts = counted_lookups(engine)
    check_greedy(engine, workload(3))
    assert max(counts) == max_trees
    num_drawn = len([index for _, index in engine.drawn if index is not None])
    # Where there is no other, the index drafts for the first one.
    assert len(counts) == num_drawn if max_trees == 1 else len(counts) > num_drawn


def test_a_tree_of_the_index_alone_needs_no_model() -> None:
    """Red when a schedule cannot save the model's forwards."""
    engine = make_engine("hybrid_alone", ROOMY)
    num_read, num_drawn = run_long(engine)
    assert num_read == 0 < num_drawn
    counted = engine.decoder.stats.as_dict()
    assert counted["source_nodes"]["index"] == counted["nodes"] - counted["trees"] > 0
    assert counted["source_nodes"]["model"] == 0


def test_the_model_drafts_for_all_where_one_request_needs_it() -> None:
    """Red when a request drafts without the model because an index serves others."""
    engine = make_engine("hybrid", ROOMY, make_schedule=PRUNED)
    engine.add(replace(LONG, token_ids=[1, 2, 3]))
    model = model_of(engine)
    before = -1
    while before != len(model.num_read):
        before = len(model.num_read)
        engine.step()
    engine.add(Request("new", [4, 5], 4))
    engine.step()
    assert len(model.num_read) == before + 1
    engine.run()


def test_seeded_answers_do_not_depend_on_the_batch() -> None:
    """Red when other requests change what a seeded one emits.

    They decide whether the model drafts beside the index, hence its tree.
    """

    def engine() -> FakeEngine:
        habits = replace(ROOMY, token_budget=200)
        made = make_engine("hybrid", habits, make_schedule=PRUNED)
        index = made.decoder.sources.text
        assert isinstance(index, SuffixIndex)
        index.cache.max_tokens = 0
        return made

    def request(number: int) -> Request:
        return Request(f"s{number}", [number, 3], 40, temperature=0.3, seed=number)

    alone = [engine().run(request(number))[0] for number in range(2)]
    together = engine()
    together.add(*workload(6, num_reqs=2))
    together.step()
    together.step()
    assert together.run(*map(request, range(2))) == alone


def test_nodes_are_counted_by_source() -> None:
    """Red when a node of both sources counts for one, or a scored one is forgotten."""
    engine = make_engine("hybrid", HABITS["all"])
    check_greedy(engine, workload(0))
    counted = engine.decoder.stats.as_dict()
    nodes, accepted = counted["source_nodes"], counted["source_accepted"]
    assert nodes.keys() == accepted.keys() == {"index", "model"}
    num_drafts = counted["nodes"] - counted["trees"]
    assert max(nodes.values()) < num_drafts < sum(nodes.values())
    num_accepted = sum(n * trees for n, trees in counted["accepted"].items())
    assert max(accepted.values()) < num_accepted < sum(accepted.values())
    assert counted["leftover_nodes"] == 0


def test_results_tell_the_sources_apart() -> None:
    """Red when accepted tokens of an index count for the model, or are not reported.

    So too for what the model drafted, and had claimed.
    """
    engine = make_engine("hybrid", HABITS["all"], make_schedule=ConstantCosts)
    schedule = engine.decoder.method.schedule
    assert isinstance(schedule, ConstantCosts)
    check_greedy(engine, workload(0))
    results = [result for result in schedule.results if result.slots]
    by_source = engine.decoder.stats.as_dict()["source_accepted"]
    by_model = sum(sum(result.accepted[Source.MODEL]) for result in results)
    assert by_model == by_source["model"]
    assert sum(sum(result.claimed[Source.MODEL]) for result in results) > by_model / 2
    found = sum(sum(result.accepted[Source.INDEX]) for result in results)
    assert found == by_source["index"]
    assert 0 < found < sum(sum(result.num_accepted) for result in results)


class SlowReading(ConstantCosts):
    """Lets a model catch up on one token a step."""

    def _plan(self, requests: RunningRequests) -> StepPlan:
        """Leave it time for one."""
        return replace(super()._plan(requests), max_caught_up=1)


def test_an_index_drafts_alone_while_a_model_catches_up() -> None:
    """Red when a long prompt that a model reads keeps an index from drafting."""
    engine = make_engine("hybrid", ROOMY, make_schedule=SlowReading)
    prompt = [1, 2, 3] * 8
    check_greedy(engine, [Request("a", [*prompt], 40)])
    schedule = engine.decoder.method.schedule
    assert isinstance(schedule, SlowReading)
    works = [result.work for result in schedule.results]
    reading = [work for work in works if work.caught_up]
    assert max(work.caught_up for work in reading) <= 2, "and a token for its root"
    assert any(work.rows for work in reading if not work.levels)
    assert any(work.levels for work in works[len(reading) :]), "it never catches up"


def test_requests_that_end_are_forgotten() -> None:
    """Red when what a request brought stays behind in its slot."""
    make = partial(AdaptiveScheduler, max_trees=16)
    engine = make_engine("hybrid", HABITS["all"], make_schedule=make)
    engine.decoder.clock.clock = lambda: float(engine.decoder.step)
    scheduler = engine.decoder.method.schedule
    assert isinstance(scheduler, AdaptiveScheduler)
    check_greedy(engine, workload(0))
    assert scheduler.calibration.ratios.texts, "nothing was learned"
    engine.step()
    assert not scheduler.calibration.ratios.requests
    assert not scheduler.values.ratios.requests
    assert not scheduler.maker.lives.begun
