"""What a measured schedule keeps from one start to the next."""

from __future__ import annotations

import pytest

from tests.fast.test_measured_schedule import (
    HEAD,
    INDEX,
    Machine,
    Run,
    Tree,
    median,
)
from vllm_treespec.schedule.experience import (
    RECALLED_PROMISES,
    Experience,
    experience_of,
    recall,
)
from vllm_treespec.schedule.measured import MeasuredSchedule
from vllm_treespec.schedule.prices import GUESSED_PROMISES, DraftParts

BATCH_SIZES = (1, 2, 4, 8, 16, 32)


def start(seed: int, experience: Experience | None = None) -> Run:
    """A machine that just started, with what an earlier start learned."""
    trees = HEAD if seed % 2 else INDEX
    run = Run(Machine(seed, trees), MeasuredSchedule(trees, 64))
    if experience is not None:
        as_text = experience.model_dump_json()
        recall(run.schedule, Experience.model_validate_json(as_text))
    return run


def learned(seed: int) -> Experience:
    """What a schedule knows of a machine after 1,000 steps."""
    run = start(seed)
    run.steps(1000, BATCH_SIZES[seed % 6])
    return experience_of(run.schedule)


@pytest.mark.thorough
def test_the_second_start_knows_the_best_tree() -> None:
    """Red when a start looks again at trees that the one before has measured."""
    first: list[float] = []
    second: list[float] = []
    for seed in range(48):
        for runs, experience in ((first, None), (second, learned(seed))):
            run = start(seed, experience)
            run.steps(60, BATCH_SIZES[seed % 6])
            runs.append(run.share)
    assert median(second) > 0.95
    assert sum(second) / 48 > sum(first) / 48 + 0.02


def test_what_is_kept_is_what_was_learned() -> None:
    """Red when a time or an acceptance is kept of another tree or kind."""
    run = start(1)
    run.steps(500, 4)
    experience = experience_of(run.schedule)
    machine, schedule = run.machine, run.schedule
    seconds = experience.seconds["greedy"][4]
    assert seconds["plain"] == schedule.costs.times[4][None].seconds
    for index, tree in enumerate(HEAD):
        if tree.name in seconds:
            exact = machine.seconds(index, 4)
            assert seconds[tree.name] == pytest.approx(exact, rel=0.2)
    assert experience.seconds["sampled"] == {}
    assert experience.accepted["sampled"] == {}
    assert experience == experience_of(start(1, experience).schedule)


@pytest.mark.parametrize(
    ("seconds", "of_whole_trees"),
    [(0.2, 0.3), (0.12, 0.14), (0.1, 0.1), (0.09, 0.09), (0.05, 0.05)],
)
def test_a_step_with_few_trees_tells_of_a_whole_one(
    seconds: float, of_whole_trees: float
) -> None:
    """Red when a fast step after slow plain ones makes a time of 0, or less."""
    schedule = MeasuredSchedule(HEAD, 64)
    schedule.costs.add(4, None, 0.0, 0.1)
    schedule.costs.add(4, 0, 0.25, seconds)
    learned = experience_of(schedule).seconds["greedy"][4]
    assert learned[HEAD[0].name] == pytest.approx(of_whole_trees)


def test_prices_are_kept() -> None:
    """Red when a start has to learn again what drafts cost, and what they keep."""
    trees = [Tree(16, 12, 16, weighs_drafts=True)]
    schedule = MeasuredSchedule(trees, 64)
    schedule.costs.add(4, None, 0.0, 0.05)
    for number in range(60):
        odd = number % 2 == 1
        counts = DraftParts.of_step(1 + number % 3, number % 8, number % 5, odd)
        schedule.costs.drafts.add(0, 4, counts, 0.09, 0.05)
        schedule.promises.observe(0, number, True, promised=2.0, accepted=1)
        schedule.model_promises.observe(0, number, True, promised=4.0, accepted=1)
    as_text = experience_of(schedule).model_dump_json()
    again = MeasuredSchedule(trees, 64)
    recall(again, Experience.model_validate_json(as_text))
    before, after = (s.costs.drafts.times[4].fit(0) for s in (schedule, again))
    assert after == pytest.approx(before, abs=1e-4)
    assert again.promises.kept(0, 999, True) == pytest.approx(0.5, abs=0.25)
    assert again.promises.kept(0, 999, False) == 1
    known, guessed = RECALLED_PROMISES, GUESSED_PROMISES
    mean = (known * 0.25 + guessed * 1.0) / (known + guessed)
    assert again.model_promises.kept(0, 999, True) == pytest.approx(mean)
    assert again.model_promises.kept(0, 999, True) < again.promises.kept(0, 999, True)


def test_nothing_learned_is_nothing_kept() -> None:
    """Red when a start without steps makes a mean of nothing."""
    assert experience_of(start(0).schedule) == Experience(
        seconds={"greedy": {}, "sampled": {}},
        accepted={"greedy": {}, "sampled": {}},
        drafts={"greedy": {}, "sampled": {}},
    )


@pytest.mark.parametrize("factor", [0.4, 3.0])
def test_times_of_another_machine_are_noticed(factor: float) -> None:
    """Red when a cache from another machine decides which trees are drawn."""
    experience = learned(3)
    other = {
        size: {name: factor * seconds for name, seconds in by_name.items()}
        for size, by_name in experience.seconds["greedy"].items()
    }
    run = start(3, experience.model_copy(update={"seconds": {"greedy": other}}))
    size = BATCH_SIZES[3]
    run.steps(40, size)
    assert run.schedule.costs.is_other_machine
    exact = run.machine.seconds(None, size)
    assert run.schedule.costs.times[size][None].seconds == pytest.approx(exact, rel=0.2)
    same = start(3, experience)
    same.steps(40, size)
    assert not same.schedule.costs.is_other_machine


@pytest.mark.thorough
def test_only_the_tree_s_own_time_was_wrong() -> None:
    """Red when trees whose recalled times are too long are never drawn again."""
    shares = []
    for seed in range(12):
        experience = learned(seed)
        wrong = {
            size: {
                name: seconds * (1.0 if name == "plain" else 2.5)
                for name, seconds in by_name.items()
            }
            for size, by_name in experience.seconds["greedy"].items()
        }
        update = {"seconds": {"greedy": wrong}}
        run = start(seed, experience.model_copy(update=update))
        run.steps(3000, BATCH_SIZES[seed % 6])
        run.seconds = run.best_seconds = 0.0
        run.steps(500, BATCH_SIZES[seed % 6])
        shares.append(run.share)
    assert min(shares) > 0.93


@pytest.mark.thorough
def test_another_text_is_learned_again() -> None:
    """Red when what was accepted of an earlier text decides for long."""
    shares = []
    for seed in range(24):
        experience = learned(seed)
        run = start(seed, experience)
        run.machine.level_accepted = 1 - run.machine.level_accepted
        run.steps(600, BATCH_SIZES[seed % 6])
        shares.append(run.share)
    assert sum(shares) / len(shares) > 0.95
    assert min(shares) > 0.85
