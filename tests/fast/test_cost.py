"""The cost model finds what terms of a step take, from few noisy times."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from vllm_treespec.schedule.cost import (
    PRIOR,
    UNTIMED_ROW,
    UNTIMED_ROWS,
    CostModel,
)
from vllm_treespec.schedule.forward_times import MORE_ROWS, NOT_TIMED, ForwardTimes
from vllm_treespec.schedule.plan import Work

PLAIN, REQUESTS = 0.05, 8
# What a row, a level and others take, in seconds.
ROW, LEVEL, FIXED, BRANCHES, TOKEN = 0.0005, 0.01, 0.004, 0.005, 0.0002
TIMED = ForwardTimes(
    target={1: 0.10, 8: 0.10, 16: 0.10, 32: 0.16, 64: 0.32},
    draft={1: 0.02, 8: 0.02, 16: 0.03, 32: 0.04, 64: 0.08},
)


def exact(work: Work, row: float = ROW, level: float = LEVEL) -> float:
    """Seconds of a step."""
    return (
        PLAIN
        + row * work.rows
        + level * work.levels
        + FIXED * work.drafted
        + BRANCHES * work.branches
        + TOKEN * work.caught_up
    )


def any_work(source: random.Random, **others: Any) -> Work:
    """A plain step, one of four times, or a step with drafts."""
    if source.random() < 0.25:
        return Work(REQUESTS)
    rows = source.randrange(1, 30)
    return Work(REQUESTS, rows=rows, drafted=1.0)._replace(**others)


def observe(
    model: CostModel, work: Work, seconds: float, drafting: float = 0.0
) -> None:
    """Let a step pass."""
    model.count(work.requests, work.sampled)
    model.observe(work, seconds, drafting)


def measured(
    seed: int,
    work: Callable[[random.Random], Work] = any_work,
    num_steps: int = 80,
    noise: float = 0.06,
    **costs: float,
) -> CostModel:
    """A model after steps whose times scatter."""
    model, source = CostModel(), random.Random(seed)
    observe(model, Work(REQUESTS), PLAIN)
    for _ in range(num_steps):
        done = work(source)
        observe(model, done, exact(done, **costs) * source.gauss(1, noise))
    return model


@pytest.mark.parametrize("row", [0.0, 0.0005, 0.002, 0.006])
def test_costs_of_rows_are_found(row: float) -> None:
    """Red when times of steps with more drafts do not make a row dearer."""
    for seed in range(4):
        model = measured(seed, row=row)
        costs = model.draft_costs(REQUESTS, False)
        assert costs.row == pytest.approx(row, rel=0.15, abs=0.0003)
        assert costs.fixed < 0.01
        work = Work(REQUESTS, rows=20, drafted=1.0)
        assert model.seconds(work).mean == pytest.approx(exact(work, row), rel=0.08)


@pytest.mark.parametrize("level", [0.004, 0.02])
def test_levels_are_told_from_rows(level: float) -> None:
    """Red when a draft model's forwards make rows of the target dear."""
    for seed in range(4):

        def work(source: random.Random) -> Work:
            return any_work(source, levels=source.randrange(1, 5))

        costs = measured(seed, work, level=level).draft_costs(REQUESTS, False)
        assert costs.row == pytest.approx(ROW, abs=0.0004)
        assert costs.level == pytest.approx(level, rel=0.3, abs=0.001)


def test_levels_are_told_by_how_long_models_draft() -> None:
    """Red when a machine whose target is disturbed does not know what a level takes.

    Deeper trees have more drafts, so times of whole steps tell both apart badly.
    """
    errors: dict[bool, list[float]] = {True: [], False: []}
    for seed in range(8):
        source, models = random.Random(seed), {True: CostModel(), False: CostModel()}
        for model in models.values():
            observe(model, Work(REQUESTS), PLAIN)
        for _ in range(60):
            levels = source.randrange(1, 4)
            rows = 8 * levels + source.randrange(3)
            work = Work(REQUESTS, rows=rows, drafted=1.0, levels=levels)
            drafting = LEVEL * levels * source.gauss(1, 0.05)
            target = (exact(work) - LEVEL * levels) * source.gauss(1, 0.25)
            for known, model in models.items():
                observe(model, work, target + drafting, drafting if known else 0.0)
        for known, model in models.items():
            found = model.draft_costs(REQUESTS, False).level
            errors[known].append(abs(found - LEVEL))
    assert max(errors[True]) < 0.08 * LEVEL
    assert sum(errors[False]) > 5 * sum(errors[True])


def test_drafting_takes_no_time_of_the_target() -> None:
    """Red when what models take makes rows or any drafts dear, too."""
    model = CostModel()
    observe(model, Work(REQUESTS), PLAIN)
    work = Work(REQUESTS, rows=8, drafted=1.0, levels=2)
    for _ in range(60):
        observe(model, work, 2 * PLAIN, drafting=PLAIN)
    costs = model.draft_costs(REQUESTS, False)
    assert costs.level == pytest.approx(PLAIN / 2, rel=0.05)
    assert 8 * costs.row + costs.fixed < 0.1 * PLAIN


def test_levels_are_learned_where_no_draft_was_worth_a_row() -> None:
    """Red when a model whose drafts are all left out looks cheap."""
    model = CostModel()
    observe(model, Work(1), PLAIN)
    for _ in range(60):
        observe(model, Work(1, levels=2), 2 * PLAIN)
    assert model.draft_costs(1, False).level == pytest.approx(PLAIN / 2, rel=0.1)


def test_branches_are_told_from_drafts() -> None:
    """Red when trees that are no chains make all drafts dear."""
    for seed in range(4):

        def work(source: random.Random) -> Work:
            return any_work(source, branches=float(source.random() < 0.5))

        costs = measured(seed, work, noise=0.03).draft_costs(REQUESTS, False)
        assert costs.branches == pytest.approx(BRANCHES, abs=0.002)
        assert costs.fixed == pytest.approx(FIXED, abs=0.002)


def test_catching_up_is_told_from_levels() -> None:
    """Red when a draft model that reads a long prompt makes its levels dear."""

    def work(source: random.Random) -> Work:
        return any_work(source, levels=3, caught_up=500 * (source.random() < 0.1))

    costs = measured(0, work).draft_costs(REQUESTS, False)
    assert costs.caught_up == pytest.approx(TOKEN, rel=0.2)
    assert costs.level == pytest.approx(LEVEL, rel=0.25)


def test_looking_up_is_no_part_of_a_plain_step() -> None:
    """Red when steps in which an index finds nothing make plain ones look slow."""
    model, source = CostModel(), random.Random(0)
    for step in range(200):
        looked_up = step % 4 > 0
        seconds = PLAIN * (1.0 + 0.1 * looked_up) * source.gauss(1, 0.03)
        observe(model, Work(REQUESTS, lookup=float(looked_up)), seconds)
    plain, with_lookup = (
        model.seconds(Work(REQUESTS, lookup=lookup)).mean for lookup in (0.0, 1.0)
    )
    assert plain == pytest.approx(PLAIN, rel=0.02)
    assert with_lookup == pytest.approx(1.1 * PLAIN, rel=0.02)


def test_a_disturbed_step_changes_little() -> None:
    """Red when one step that took ten times as long makes drafts too dear."""
    model, work = measured(0), Work(REQUESTS, rows=20, drafted=1.0)
    before = model.draft_costs(REQUESTS, False).row
    expected = model.seconds(work).mean
    observe(model, work, 10 * expected)
    assert model.draft_costs(REQUESTS, False).row < 1.2 * before
    assert model.seconds(work).mean < 1.1 * expected


def test_old_costs_are_forgotten() -> None:
    """Red when drafts that were too dear once are never tried again."""
    work = Work(REQUESTS, rows=10, drafted=1.0)
    model, fresh = measured(0, row=0.006), CostModel()
    observe(fresh, Work(REQUESTS), PLAIN)
    prior = fresh.draft_costs(REQUESTS, False).row
    dear = model.draft_costs(REQUESTS, False).row
    doubt = model.seconds(work).error
    assert dear > 4 * prior
    model.count(REQUESTS, False, 10_000)
    assert model.draft_costs(REQUESTS, False).row == pytest.approx(prior, rel=0.35)
    assert model.seconds(work).error > 3 * doubt


@pytest.mark.parametrize("factor", [2.5, 0.4])
def test_the_pace_changes_all_estimates(factor: float) -> None:
    """Red when a machine that becomes slower is mistaken for one of dear drafts.

    Steps of one batch size tell the machine's speed for another one.
    """
    model, source = CostModel(), random.Random(0)

    def run(num_steps: int, pace: float, requests: int) -> None:
        for _ in range(num_steps):
            work = any_work(source, levels=2)._replace(requests=requests)
            observe(model, work, pace * exact(work) * source.gauss(1, 0.04))

    observe(model, Work(REQUESTS), PLAIN)
    run(300, 1.0, REQUESTS)
    run(300, 1.0, 1)
    before = model.draft_costs(1, False)
    drafts = Work(REQUESTS, rows=15, drafted=1.0, levels=2)
    run(30, factor, REQUESTS)
    for work in (Work(REQUESTS), drafts):
        expected = factor * exact(work)
        assert model.seconds(work).mean == pytest.approx(expected, rel=0.15)
    costs = model.draft_costs(1, False)
    assert costs.row == pytest.approx(factor * before.row, rel=0.45)
    assert costs.level == pytest.approx(factor * before.level, rel=0.45)
    run(60, 1.0, REQUESTS)
    assert model.seconds(drafts).mean == pytest.approx(exact(drafts), rel=0.15)


def test_a_batch_size_begins_with_its_nearest() -> None:
    """Red when each batch size, or kind of request, learns anew what drafts cost."""
    dear = measured(0, row=0.004, num_steps=200)
    observe(dear, Work(32), 0.2)
    plain = dear.seconds(Work(REQUESTS)).mean
    per_plain = dear.draft_costs(REQUESTS, False).row / plain
    for requests, sampled in ((4, False), (REQUESTS, True)):
        work = Work(requests, sampled)
        assert dear.seconds(work).mean == pytest.approx(plain)
        # A row of fewer requests costs a larger part of a step.
        share = (REQUESTS + UNTIMED_ROWS) / (requests + UNTIMED_ROWS)
        row = dear.draft_costs(requests, sampled).row
        assert row == pytest.approx(per_plain * share * plain, rel=0.1)
        assert dear.seconds(work).error > dear.seconds(Work(REQUESTS)).error


def test_kinds_of_requests_have_times_of_their_own() -> None:
    """Red when a sampled step is a measure for greedy ones."""
    model = CostModel()
    for step in range(400):
        sampled = step // 20 % 2 == 1
        observe(model, Work(1, sampled), 1.5 if sampled else 1.0)
    for sampled, seconds in ((False, 1.0), (True, 1.5)):
        assert model.seconds(Work(1, sampled)).mean == pytest.approx(seconds, rel=0.08)


def test_timed_forwards_are_priors() -> None:
    """Red when what is assumed of a small target is assumed of every one."""
    timed, untimed = CostModel(), CostModel()
    timed.begin_with(TIMED)
    with pytest.raises(LookupError):
        untimed.seconds(Work(4))
    assert timed.seconds(Work(4)).mean == pytest.approx(0.1)
    observe(untimed, Work(4), 0.1)
    prior = untimed.draft_costs(4, False)
    row = UNTIMED_ROW / (4 + UNTIMED_ROWS) * 0.1
    assert prior.row == pytest.approx(row)
    assert prior.level == pytest.approx(PRIOR.level * 0.1)
    costs = timed.draft_costs(4, False)
    forward = (0.16 + 0.16 * 20 / 32 - 0.10) / MORE_ROWS
    assert costs.row == pytest.approx(forward + 0.1 * row), "a part is the host's"
    assert costs.level == pytest.approx(0.02)
    assert costs.caught_up == pytest.approx(0.04 / 32)
    assert costs.fixed == pytest.approx(prior.fixed)
    head = CostModel()
    head.begin_with(ForwardTimes(TIMED.target))
    assert head.draft_costs(4, False).level == pytest.approx(prior.level)


def test_no_term_becomes_free() -> None:
    """Red when disturbed steps make rows free, and trees as large as can be."""
    for forwards, least in ((NOT_TIMED, 0.05), (TIMED, 0.5)):
        model = CostModel()
        model.begin_with(forwards)
        observe(model, Work(REQUESTS), 0.1)
        prior = model.draft_costs(REQUESTS, False).row / model.pace
        for rows, seconds in [(10, 0.5), (31, 0.11)] * 20:
            observe(model, Work(REQUESTS, rows=rows, drafted=1.0), seconds)
        row = model.draft_costs(REQUESTS, False).row / model.pace
        assert row == pytest.approx(least * prior)
