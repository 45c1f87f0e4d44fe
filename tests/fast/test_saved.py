"""What an adaptive scheduler keeps from one start to the next."""

from __future__ import annotations

import pytest

from tests.fast.scheduled_trees import HEAD, HYBRID, INDEX, serve
from vllm_treespec.schedule.decay import PRIOR_WEIGHT
from vllm_treespec.schedule.forward_times import ForwardTimes
from vllm_treespec.schedule.plan import Work
from vllm_treespec.schedule.saved import (
    KINDS,
    RESTORED,
    SchedulerState,
    restore,
    state_of,
)
from vllm_treespec.schedule.scheduler import AdaptiveScheduler
from vllm_treespec.trees.source import Source


def started_with(state: SchedulerState, *trees: object) -> AdaptiveScheduler:
    """A scheduler of HEAD, or of these trees, with a state that was a file."""
    scheduler = AdaptiveScheduler(trees or HEAD, 64)  # type: ignore[arg-type]
    as_text = state.model_dump_json()
    restore(scheduler, SchedulerState.model_validate_json(as_text))
    return scheduler


def test_what_is_restored_is_what_was_learned() -> None:
    """Red when a time or an acceptance is kept of another tree, size or kind."""
    scheduler = AdaptiveScheduler(HEAD, 64)
    serve(scheduler, 300, range(4))
    serve(scheduler, 300, range(4, 6), sampled=True, plain=1.5, accepted=2)
    state = state_of(scheduler)
    again = started_with(state)
    assert state_of(again) == state
    for work, seconds in ((Work(4), 1.0), (Work(2, sampled=True), 1.5)):
        found, known = (s.cost.seconds(work).mean for s in (again, scheduler))
        assert found == pytest.approx(known)
        # The pace is one for all sizes.
        assert found == pytest.approx(seconds, rel=0.15)
    share = RESTORED / (RESTORED + PRIOR_WEIGHT)
    names = {tree.name: again.options[index] for index, tree in enumerate(HEAD)}
    for kind, sampled in KINDS:
        assert state.accepted[kind]
        for name in state.accepted[kind]:
            mean = share * (2 if sampled else 1) + (1 - share) * names[name].prior
            restored = again.values.tokens(names[name], 99, sampled)
            assert restored.mean == pytest.approx(mean, rel=0.3)


def test_costs_and_ratios_of_pruned_trees_are_restored() -> None:
    """Red when a start learns again what drafts cost, and how true claims are."""
    scheduler = AdaptiveScheduler([HYBRID, INDEX], 64)
    for number in range(80):
        rows, levels = number % 8, number % 3
        seconds = 0.05 + 0.004 * rows + 0.01 * levels
        scheduler.cost.count(4, False)
        scheduler.cost.observe(Work(4, rows=rows, levels=levels), seconds)
    for source, ratio in ((Source.INDEX, 0.5), (Source.MODEL, 0.25)):
        tokens = 100.0, 100.0 * ratio
        scheduler.calibration.ratios.add_to_text(0, source, True, *tokens)
    again = started_with(state_of(scheduler), HYBRID, INDEX)
    costs, expected = (s.cost.draft_costs(4, False) for s in (again, scheduler))
    assert costs == pytest.approx(expected, rel=0.05)
    for source, ratio in ((Source.INDEX, 0.5), (Source.MODEL, 0.25)):
        mean = (RESTORED * ratio + PRIOR_WEIGHT) / (RESTORED + PRIOR_WEIGHT)
        assert again.calibration.kept(0, source, 99, True) == pytest.approx(mean)
        assert again.calibration.kept(0, source, 99, False) == 1.0


def test_trees_are_known_by_their_names() -> None:
    """Red when another order of trees gives each the values of another one."""
    scheduler = AdaptiveScheduler(HEAD, 64)
    serve(scheduler, 200)
    state = state_of(scheduler)
    assert state_of(started_with(state, *reversed(HEAD))) == state
    with pytest.raises(KeyError):
        started_with(state, *HEAD[1:], HYBRID)


def test_nothing_learned_is_nothing_kept() -> None:
    """Red when a start without steps makes a mean of nothing."""
    nothing: dict[str, dict[str, object]] = {"greedy": {}, "sampled": {}}
    assert state_of(AdaptiveScheduler(HEAD, 64)) == SchedulerState.model_validate(
        {"costs": nothing, "accepted": nothing, "kept": nothing}
    )


def test_timed_forwards_are_kept() -> None:
    """Red when the next start times again what is known."""
    timed = ForwardTimes(target={1: 0.1, 8: 0.2}, draft={1: 0.01, 8: 0.02})
    scheduler = AdaptiveScheduler(HEAD, 64)
    scheduler.begin_with(timed)
    assert started_with(state_of(scheduler)).cost.forwards == timed


@pytest.mark.parametrize("factor", [0.4, 3.0])
def test_times_of_another_machine_are_soon_corrected(factor: float) -> None:
    """Red when a file from a machine of another speed decides for long."""
    scheduler = AdaptiveScheduler(HEAD, 64)
    serve(scheduler, 300, range(4))
    again = started_with(state_of(scheduler))
    serve(again, 40, range(4), plain=factor, tree=0.4 * factor)
    assert again.cost.seconds(Work(4)).mean == pytest.approx(factor, rel=0.2)
