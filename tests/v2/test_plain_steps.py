"""What draft trees add to steps without a tree."""

from __future__ import annotations

from tests.v2.engines import engine
from tests.v2.operations import counted_steps
from tests.v2.prompts import PARAMS, PROMPTS
from tests.v2.test_trees import INDEX


def test_resting_steps_are_stock(target: str) -> None:
    """Red when a step in a rest of the schedule runs an operation of ours.

    It takes a view of the placeholders, which copies nothing.
    """
    spec = {**INDEX, "schedule": "measured", "schedule_cache": False}
    with engine(target, spec) as running, counted_steps(running) as steps:
        running.generate(PROMPTS[:2], PARAMS["sampled"], 80)
    rests = [step for step in steps if step.rested]
    assert rests
    for step in rests:
        assert [name for _, name in step.found] == ["slice"]
