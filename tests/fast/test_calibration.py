"""Claims are compared with what is accepted, by source, kind and request."""

from __future__ import annotations

import random

import pytest

from vllm_treespec.schedule.calibration import PRIOR_SURVIVAL, Calibration
from vllm_treespec.schedule.plan import StepResult, Work
from vllm_treespec.trees.source import Source

INDEX, MODEL = Source.INDEX, Source.MODEL
GREEDY, SAMPLED = False, True


def observe(
    calibration: Calibration,
    kinds: dict[int, bool],
    claimed: dict[Source, list[float]],
    accepted: dict[Source, list[int]],
    num_steps: int = 60,
) -> None:
    """Let steps pass, each alike."""
    count = len(kinds)
    result = StepResult(
        0,
        Work(count),
        slots=list(kinds),
        num_drafts=[9] * count,
        num_accepted=[0] * count,
        limits=[63] * count,
        claimed=claimed,
        accepted=accepted,
    )
    for step in range(num_steps):
        calibration.observe(step, kinds, result)


def test_claims_are_compared_with_what_is_accepted() -> None:
    """Red when a text, or a request, of which little is accepted counts in full."""
    calibration = Calibration()
    assert calibration.kept(0, INDEX, 1, GREEDY) == 1.0
    observe(calibration, {1: GREEDY, 2: GREEDY}, {INDEX: [2.0, 2.0]}, {INDEX: [2, 0]})
    good, bad, other = (calibration.kept(60, INDEX, s, GREEDY) for s in (1, 2, 3))
    assert good == pytest.approx(1.0, abs=0.15)
    assert bad < 0.1
    assert other == pytest.approx(0.5, abs=0.1)
    assert calibration.kept(60, INDEX, 3, SAMPLED) == 1.0
    calibration.forget([2])
    assert calibration.kept(60, INDEX, 2, GREEDY) == other


def test_index_and_model_are_judged_apart() -> None:
    """Red when an index that claims too much makes its model's levels dear."""
    calibration = Calibration()
    claimed = {INDEX: [8.0], MODEL: [3.0]}
    observe(calibration, {0: GREEDY}, claimed, {INDEX: [1], MODEL: [3]})
    for slot in (0, 9):
        assert calibration.kept(60, INDEX, slot, GREEDY) < 0.2
        assert calibration.kept(60, MODEL, slot, GREEDY) == pytest.approx(1.0)


def test_requests_that_do_not_run_tell_nothing() -> None:
    """Red when a tree of a request that ended is learned for its slot's next one."""
    calibration = Calibration()
    result = StepResult(
        0, Work(1), slots=[5], claimed={INDEX: [2.0]}, accepted={INDEX: [0]}
    )
    calibration.observe(0, {}, result)
    assert not calibration.ratios.requests
    assert calibration.kept(0, INDEX, 5, GREEDY) == 1.0


def test_few_trees_tell_little() -> None:
    """Red when one unlucky tree ends what an index drafts; claims of 0 tell nothing."""
    calibration = Calibration()
    observe(calibration, {0: GREEDY}, {INDEX: [1.0]}, {INDEX: [0]}, num_steps=1)
    assert calibration.kept(0, INDEX, 0, GREEDY) > 0.6
    observe(calibration, {1: GREEDY}, {INDEX: [0.0]}, {INDEX: [0]})
    assert (INDEX, 1) not in calibration.ratios.requests


def test_survival_by_depth_is_learned() -> None:
    """Red when where a host must not wait a depth is judged by another one, or kind."""
    calibration, source = Calibration(), random.Random(0)
    assert calibration.survival(0, GREEDY, 3) == pytest.approx(
        [PRIOR_SURVIVAL**level for level in (1, 2, 3)]
    )
    for step in range(400):
        accepted = 0
        while source.random() < 0.8 and accepted < 4:
            accepted += 1
        calibration.observe_levels(step, GREEDY, 4, accepted)
    found = calibration.survival(400, GREEDY, 6)
    assert found[:4] == pytest.approx([0.8**level for level in (1, 2, 3, 4)], abs=0.1)
    assert found[5] == pytest.approx(found[3] * (found[3] / found[2]) ** 2), "unread"
    assert calibration.survival(400, SAMPLED, 1) == pytest.approx([PRIOR_SURVIVAL])


def test_a_level_that_was_not_read_is_not_judged() -> None:
    """Red when shallow trees teach that deep levels are never accepted."""
    calibration = Calibration()
    for step in range(100):
        calibration.observe_levels(step, GREEDY, 1, 1)
    assert calibration.survival(100, GREEDY, 3)[2] > 0.85
