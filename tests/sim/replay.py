"""Judge a cost model by the log of an engine: ``python -m tests.sim.replay LOG``.

An engine writes a line for each step where ``VLLM_LOGGING_LEVEL=DEBUG`` is set.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

from vllm_treespec.schedule.cost import CostModel
from vllm_treespec.schedule.plan import Estimate, Work
from vllm_treespec.schedule.step_log import LoggedStep, read_steps


class Judged(Protocol):
    """A model of what steps take."""

    def seconds(self, work: Work) -> Estimate:
        """What a step takes; raises LookupError before it can tell."""

    def observe(
        self, work: Work, seconds: float, drafting_seconds: float, steps: int
    ) -> None:
        """Learn from steps of these mean seconds."""


class Counted:
    """The cost model, which also counts the steps by which it forgets."""

    def __init__(self) -> None:
        """Begin with nothing measured."""
        self.model = CostModel()

    def seconds(self, work: Work) -> Estimate:
        """What a step takes."""
        return self.model.seconds(work)

    def observe(
        self, work: Work, seconds: float, drafting_seconds: float, steps: int
    ) -> None:
        """Count the steps, and learn from their mean."""
        self.model.count(work.requests, work.sampled, steps)
        self.model.observe(work, seconds, drafting_seconds)


def kind_of(work: Work) -> str:
    """What a step did."""
    if work.levels:
        return "levels"
    if work.rows:
        return "drafts"
    return "lookup" if work.lookup else "plain"


def errors_of(model: Judged, steps: Iterable[LoggedStep]) -> dict[str, list[float]]:
    """Absolute relative errors of the model one step ahead, by kind of step."""
    errors: dict[str, list[float]] = {}
    for step in steps:
        if step.seconds is None:
            continue
        try:
            expected = model.seconds(step.work).mean
        except LookupError:
            # Nothing is known before the first plain step.
            expected = None
        if expected is not None:
            error = abs(expected / step.seconds - 1)
            errors.setdefault(kind_of(step.work), []).append(error)
        model.observe(step.work, step.seconds, step.drafting_seconds, step.num_steps)
    return errors


def main() -> None:
    """Print the mean error of each kind of step."""
    parser = argparse.ArgumentParser(prog="python -m tests.sim.replay")
    parser.add_argument("log", type=Path)
    with parser.parse_args().log.open() as lines:
        errors = errors_of(Counted(), read_steps(lines))
    for kind, of_kind in sorted(errors.items()):
        mean = sum(of_kind) / len(of_kind)
        print(f"{kind}: {100 * mean:.1f} % in {len(of_kind)} observations")


if __name__ == "__main__":
    main()
