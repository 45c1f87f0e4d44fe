"""The adaptive scheduler: rounds, limits, ranks, plans. Scores are in ``tests/sim``."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest

from tests.fast.scheduled_trees import (
    ALL,
    BOTH,
    HEAD,
    HYBRID,
    INDEX,
    Tree,
    result_of,
    running,
    serve,
)
from vllm_treespec.schedule.offers import Offer
from vllm_treespec.schedule.plan import PLAIN_PLAN, RunningRequests, StepPlan, Work
from vllm_treespec.schedule.scheduler import (
    MANY_TOKENS,
    ROUND_STEPS,
    AdaptiveScheduler,
    levels_worth_reading,
)
from vllm_treespec.trees.source import Source

TREES = {"head": HEAD, "hybrid": (HYBRID, INDEX)}


def scheduler_of(*trees: Tree, can_sync: bool = True) -> AdaptiveScheduler:
    return AdaptiveScheduler(trees, 64, can_sync=can_sync)


# Rounds


def test_a_start_measures_plain_steps_first() -> None:
    """Red when trees are compared with a plain step that was never timed."""
    scheduler = scheduler_of(*HEAD)
    plans = serve(scheduler, 60, range(2))
    assert plans[:ROUND_STEPS] == [PLAIN_PLAN] * ROUND_STEPS
    rounds = [
        {plan.tree for plan in plans[at : at + ROUND_STEPS]}
        for at in range(0, 60, ROUND_STEPS)
    ]
    assert all(len(choices) == 1 for choices in rounds)
    assert len(set.union(*rounds)) > 1


def test_plain_rounds_rest() -> None:
    """Red when plain steps plan each time, or steps with trees are not planned."""
    scheduler = scheduler_of(*HEAD)
    serve(scheduler, 1, accepted=0)
    assert not scheduler.rest_steps, "the first step of a choice is not timed"
    rests = Counter[tuple[bool, int]]()
    for _ in range(400):
        (plan,) = serve(scheduler, 1, accepted=0)
        rests[plan.tree is None, scheduler.rest_steps] += 1
    assert rests[True, ROUND_STEPS - 1] > 50
    assert sum(rests[True, count] for count in range(ROUND_STEPS)) > 300
    assert not any(rests[False, count] for count in range(1, ROUND_STEPS))


def test_a_change_of_the_batch_begins_a_round() -> None:
    """Red when a choice for one batch size, or kind of requests, holds for another."""
    scheduler = scheduler_of(*HEAD)
    serve(scheduler, 40, accepted=3)
    assert serve(scheduler, 1, accepted=3)[0].tree is not None
    serve(scheduler, 1, range(8))
    assert (scheduler.round.size, scheduler.round.sampled) == (8, False)
    serve(scheduler, 1, sampled=True)
    assert (scheduler.round.size, scheduler.round.sampled) == (1, True)


def test_steps_after_a_change_are_not_timed() -> None:
    """Red when a step that does another one's work, too, teaches times.

    Where draft models caught up on many tokens it tells what those take.
    """
    scheduler = scheduler_of(replace(HEAD[0], draft_depth=3))
    requests = running([0])
    for caught_up, count in ((0, 0), (MANY_TOKENS, 1)):
        scheduler.round.steps_left = 0
        plan = scheduler.plan(requests)
        scheduler.round.settled = False
        scheduler.timed.clear()
        scheduler.observe(result_of(plan, requests, 1.0, caught_up=caught_up))
        assert len(scheduler.timed) == count


def test_trees_that_cannot_be_timed_are_given_up() -> None:
    """Red when an option is tried for ever because no step of it is timed."""
    scheduler = scheduler_of(*HEAD)
    chosen: Counter[int | None] = Counter()
    requests = running([0, 1])
    for step in range(1000):
        plan = scheduler.plan(requests)
        chosen[plan.tree] += 1
        seconds = 1.0 if plan.tree is None and step < 50 else None
        scheduler.observe(result_of(plan, requests, seconds))
    assert chosen[None] > 850


@pytest.mark.parametrize("sizes", [(4, 5), (1, 1, 1, 4)])
def test_sizes_that_are_never_timed_borrow(sizes: tuple[int, ...]) -> None:
    """Red when trees are never drawn where each step has another batch size.

    Or where no step of a batch size only decodes.
    """
    scheduler = scheduler_of(HEAD[1])
    with_tree: Counter[int] = Counter()
    for step in range(600):
        size = sizes[step * len(sizes) // 600 if len(sizes) > 2 else step % 2]
        requests = running(range(size))
        plan = scheduler.plan(requests)
        with_tree[size] += step > 500 and plan.tree is not None
        seconds = 1.0 if plan.tree is None else 1.3
        is_timed = len(sizes) == 2 or size == 1
        accepted = [2] * len(plan.slots)
        result = result_of(plan, requests, seconds if is_timed else None, accepted)
        scheduler.observe(result)
    assert with_tree[sizes[-1]] > 30


# Requests


def test_a_request_without_use_gets_no_tree() -> None:
    """Red when three chats cost the editing request beside them its tree."""
    scheduler = scheduler_of(*HEAD)
    requests, drawn_for = running(range(4)), Counter[int]()
    for step in range(600):
        plan = scheduler.plan(requests)
        drafts = 0 if plan.tree is None else HEAD[plan.tree].num_drafts
        depth = 0 if plan.tree is None else HEAD[plan.tree].depth
        accepted = [depth if slot == 0 else 0 for slot in plan.slots]
        rows = [drafts] * len(plan.slots)
        seconds = 1.0 + (0.1 + 0.03 * sum(rows) if plan.slots else 0.0)
        scheduler.observe(result_of(plan, requests, seconds, accepted, rows))
        if step >= 300:
            drawn_for.update(plan.slots)
    assert drawn_for[0] > 230
    assert all(drawn_for[slot] < 100 for slot in (1, 2, 3))


@pytest.mark.parametrize("limit", [1, 4, 0])
def test_limits_of_all_requests(limit: int) -> None:
    """Red when trees that all are small are timed as whole ones, or never.

    No limit of 0 comes in; a worker sets it where a cut tree would keep no draws. Of
    such steps nothing is learned, and trees are left out.
    """
    scheduler = scheduler_of(Tree(16, 4, 8))
    requests = running([0, 1], limits=[max(limit, 1)] * 2)
    with_tree = 0
    for step in range(1000):
        plan = scheduler.plan(requests)
        rows, accepted = [limit] * len(plan.slots), [min(limit, 1)] * len(plan.slots)
        seconds = 1 + 0.01 * sum(rows)
        came = replace(requests, limits=[limit] * 2)
        scheduler.observe(result_of(plan, came, seconds, accepted, rows))
        with_tree += step >= 500 and plan.tree is not None
    assert with_tree > 450 if limit else with_tree < 100
    if limit:
        costs = scheduler.cost.seconds(Work(2, rows=32, drafted=1.0, branches=1.0))
        assert costs.mean > 1 + 0.01 * 2 * 2 * limit, "a whole tree takes longer"


def test_limited_trees_do_not_fool_the_scheduler() -> None:
    """Red when requests that limit their trees hide what whole trees bring.

    Two edits accept all levels of a tree; beside them one request takes one draft at
    most, another one switched trees off.
    """
    scheduler = scheduler_of(*HEAD)
    limits = {0: ALL, 1: ALL, 2: 1}
    requests = RunningRequests(4, [*limits], [False] * 3, [*limits.values()], [0] * 3)
    drawn_for: Counter[int] = Counter()
    for step in range(600):
        plan = scheduler.plan(requests)
        tree = None if plan.tree is None else HEAD[plan.tree]
        allowed = [limits[slot] for slot in plan.slots]
        rows = [min(tree.num_drafts if tree else 0, limit) for limit in allowed]
        accepted = [min(tree.depth if tree else 0, limit) for limit in allowed]
        seconds = 1 + (0.2 + 0.02 * sum(rows) if plan.slots else 0)
        scheduler.observe(result_of(plan, requests, seconds, accepted, rows))
        if step >= 300:
            drawn_for.update(plan.slots)
    assert drawn_for[0] > 250
    assert drawn_for[1] > 250


def test_no_more_trees_than_there_is_room_for() -> None:
    """Red when a plan draws more trees than an engine has blocks for."""
    scheduler = AdaptiveScheduler(HEAD, max_trees=3)
    plans = serve(scheduler, 100, range(8), accepted=3)
    assert max(len(plan.slots) for plan in plans) == 3


def test_without_drafting_requests_steps_are_plain() -> None:
    """Red when requests that may not draft are timed as if they had trees."""
    scheduler, nobody = scheduler_of(*HEAD), RunningRequests(4, [], [], [], [])
    for _ in range(20):
        plan = scheduler.plan(nobody)
        assert plan == PLAIN_PLAN
        scheduler.observe(result_of(plan, nobody, 1.0))
    assert scheduler.cost.seconds(Work(4)).mean == pytest.approx(1.0)


@pytest.mark.parametrize("name", TREES)
def test_ended_requests_are_forgotten(name: str) -> None:
    """Red when a request starts with the fame of another that had its slot."""
    scheduler = scheduler_of(*TREES[name])
    noisy_steps(scheduler, 50, 2, random.Random(0))
    known = (
        scheduler.values.ratios.requests,
        scheduler.calibration.ratios.requests,
        scheduler.maker.lives.begun,
    )
    assert {slot for _, slot in known[0]} == known[2].keys() == {0, 1}
    assert bool(known[1]) == (name == "hybrid")
    scheduler.forget([0, 1, 7])
    assert not any(known)


# Ranks


def noisy_steps(
    scheduler: AdaptiveScheduler,
    num_steps: int,
    batch_size: int,
    source: random.Random,
    slowness: float = 1.0,
) -> list[StepPlan]:
    """Run steps whose trees bring random tokens, on a clock of its own."""
    plans = []
    for _ in range(num_steps):
        requests = running(range(batch_size))
        plan = scheduler.plan(requests)
        found = [source.randrange(3) for _ in plan.slots]
        added = [source.randrange(3) * plan.model for _ in plan.slots]
        if not plan.lookup:
            found = [0] * len(found)
        claimed: dict[Source, list[float]] = {}
        kept: dict[Source, list[int]] = {}
        if plan.prunes:
            ones = [1.0] * len(plan.slots)
            claimed = {Source.INDEX: ones, Source.MODEL: ones}
            kept = {Source.INDEX: found, Source.MODEL: added}
        seconds = 1.0 + 0.3 * plan.model + 0.05 * plan.lookup
        result = result_of(
            plan,
            requests,
            seconds * slowness * source.gauss(1.0, 0.04),
            [a + b for a, b in zip(found, added, strict=True)],
            [3] * len(plan.slots),
            claimed,
            kept,
            levels=2 * plan.model,
        )
        scheduler.observe(result)
        plans.append(plan)
    return plans


@pytest.mark.parametrize("can_sync", [True, False])
@pytest.mark.parametrize("name", TREES)
def test_all_ranks_plan_alike(name: str, can_sync: bool) -> None:
    """Red when a rank plans, or costs, by its own clock, or shares more often."""
    told: list[list[float]] = []

    def first(seconds: list[float]) -> list[float]:
        told.append(list(seconds))
        return seconds

    ranks: list[list[StepPlan]] = []
    turn = iter(told)
    shares: list[Callable[[list[float]], list[float]]] = [first, lambda _: next(turn)]
    for rank, share in enumerate(shares):
        scheduler, source = AdaptiveScheduler(TREES[name], 64, share), random.Random(3)
        scheduler.can_sync = can_sync
        ranks.append([])
        for batch_size in (1, 4, 1, 16):
            ranks[rank] += noisy_steps(scheduler, 100, batch_size, source, 1 + 2 * rank)
    assert next(turn, None) is None, "rank 0 shared more"
    assert ranks[0] == ranks[1]
    assert len({plan.tree for plan in ranks[0]}) > 1


# Plans


def test_a_forced_tree_is_drawn() -> None:
    """Red when a benchmark of one tree measures another, or teaches its times."""
    scheduler = scheduler_of(*HEAD)
    scheduler.force_tree({"num_drafts": 5})
    for plan in serve(scheduler, 20, tree=100.0):
        assert plan == StepPlan(1, (0,), model=True)
    assert not scheduler.cost.fits
    assert not scheduler.timed
    with pytest.raises(ValueError, match="it has 16 in 3"):
        scheduler.force_tree({"num_drafts": 7})


def test_fixed_trees_are_whole() -> None:
    """Red when drafts are left out of a tree whose proposer cannot do so lossless."""
    plans = serve(scheduler_of(*HEAD), 60, accepted=3)
    assert {plan.prunes for plan in plans} == {False}
    assert {plan.model for plan in plans if plan.tree is not None} == {True}


def plan_with(tree: int, can_sync: bool = True) -> tuple[AdaptiveScheduler, StepPlan]:
    """A plan of one option for a good and a bad request."""
    scheduler = scheduler_of(HYBRID, INDEX, can_sync=can_sync)
    noisy_steps(scheduler, 200, 2, random.Random(0))
    for step in range(200, 260):
        for source in Source.INDEX, Source.MODEL:
            for slot, accepted in ((0, 2), (1, 0)):
                request = scheduler.calibration.ratios.requests[source, slot]
                request.add(step, 2.0, accepted)
    option = scheduler.options[tree]
    return scheduler, scheduler._plan_of(
        Offer(option, 2.0, 1.0), [1, 0], running(range(2))
    )


def test_costs_of_a_plan_are_in_tokens() -> None:
    """Red when seconds and tokens are not brought to one measure."""
    scheduler, plan = plan_with(0)
    costs, now = scheduler.cost.draft_costs(2, False), scheduler.round
    assert now.rate > now.plain_rate > 0
    assert plan.row_cost == pytest.approx(costs.row * now.rate)
    assert plan.fixed_cost == pytest.approx(costs.fixed * now.rate)
    assert plan.branch_cost == pytest.approx(costs.branches * now.rate)
    assert plan.level_cost == pytest.approx(costs.level * now.plain_rate)
    assert (plan.tree, plan.lookup, plan.model, plan.prunes) == (0, True, True, True)


def test_a_plan_has_the_ratios_of_its_requests() -> None:
    """Red when one request's claims are judged by another one's."""
    _, plan = plan_with(0)
    assert set(plan.kept) == set(BOTH)
    for ratios in plan.kept.values():
        bad, good = ratios
        assert good > 1.5 * bad
    assert len(plan.first_level) == 2
    _, alone = plan_with(1)
    assert not alone.model
    assert set(alone.kept) == {Source.INDEX}


def test_past_steps_tell_levels_where_the_host_cannot_sync() -> None:
    """Red when a GPU's plan leaves levels open, or a CPU's does not."""
    plan = plan_with(0)[1]
    assert plan.max_levels is not None
    assert plan.max_levels == HYBRID.draft_depth, "only the bound of a step"
    _, plan = plan_with(0, can_sync=False)
    assert plan.max_levels is not None
    assert 1 <= plan.max_levels <= HYBRID.draft_depth
    assert plan_with(1, can_sync=False)[1].max_levels is None


@pytest.mark.parametrize(
    ("survival", "factors", "level_cost", "expected"),
    [
        ([[0.8, 0.6, 0.3]], [1.0], 0.25, 2),
        ([[0.8, 0.6, 0.3]], [1.0], 0.15, 3),
        ([[0.8, 0.6, 0.3]], [1.0], 0.9, 1),
        # requests pay for a level together, by what is accepted of their own trees
        ([[0.8, 0.6, 0.3]] * 2, [1.0, 1.0], 0.25, 3),
        ([[0.8, 0.6, 0.3]] * 2, [1.0, 0.1], 0.25, 2),
    ],
)
def test_levels_worth_reading(
    survival: list[list[float]], factors: list[float], level_cost: float, expected: int
) -> None:
    """Red when a level is read for less than it costs, or the first is not."""
    found = levels_worth_reading(survival, factors, 0.1, level_cost)
    assert found == expected


# Latency


def slowest_of(max_slowdown: float, seconds_of: Callable[[int, int], float]) -> float:
    """The mean of the longest tenth of steps that accept much, in plain steps."""
    (tree,) = trees = HEAD[:1]
    scheduler = AdaptiveScheduler(trees, 64, max_slowdown=max_slowdown)
    requests, seconds = running(range(8)), list[float]()
    for _ in range(600):
        plan = scheduler.plan(requests)
        rows = [tree.num_drafts] * len(plan.slots)
        accepted = [tree.depth] * len(plan.slots)
        seconds.append(seconds_of(sum(rows), len(plan.slots)))
        scheduler.observe(result_of(plan, requests, seconds[-1], accepted, rows))
    late = sorted(seconds[300:])[-30:]
    return sum(late) / len(late)


def test_a_step_takes_no_longer_than_allowed() -> None:
    """Red when many tokens a second are bought with steps that last for ever."""

    def seconds_of(rows: int, num_trees: int) -> float:
        return 1.0 + 0.015 * rows + 0.05 * bool(num_trees)

    free, bound = slowest_of(100.0, seconds_of), slowest_of(2.0, seconds_of)
    assert free > 2.8, "trees for all requests bring the most tokens a second"
    assert 1.5 < bound <= 2.15, "trees are drawn for fewer requests, not for none"


def test_a_model_that_only_reads_is_not_judged() -> None:
    """Red when a model is said to bring nothing while it catches up on a prompt."""
    scheduler, plan = plan_with(0)
    before = scheduler.values.tokens(scheduler.options[0], 0, False)
    requests, nothing = running(range(2)), [0, 0]
    for _ in range(50):
        result = result_of(plan, requests, 1.0, nothing, nothing, caught_up=100)
        scheduler.observe(result)
    assert scheduler.values.tokens(scheduler.options[0], 0, False) == before


@pytest.mark.parametrize("can_sync", [True, False])
def test_models_catch_up_in_parts(can_sync: bool) -> None:
    """Red when a long prompt is read at once, or never."""
    scheduler, plan = plan_with(0, can_sync=can_sync)
    costs, plain = scheduler.cost.draft_costs(2, False), scheduler.cost.seconds(Work(2))
    assert plan.max_caught_up is not None
    assert 1 <= plan.max_caught_up <= plain.mean / costs.caught_up
    scheduler.maker.max_slowdown = 1.0001
    slow = Offer(scheduler.options[0], 2.0, 9.0)
    tight = scheduler._plan_of(slow, [1, 0], running(range(2)))
    assert (tight.max_caught_up, tight.max_levels, tight.max_rows) == (1, 1, 2)
    assert plan_with(1)[1].max_caught_up is None, "an index has nothing to read"
