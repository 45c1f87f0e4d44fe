"""Judge a cost model by a log of real steps: ``python -m tests.sim.replay LOG``.

A log has one JSON object a line: ``work`` (the fields of ``Work``; those left out have
their defaults), ``seconds`` (null: not timed), ``drafting_seconds`` and ``num_steps``,
as in ``StepResult``. Its other fields, ``claimed`` and ``accepted``, are not read.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from vllm_treespec.schedule.cost import CostModel
from vllm_treespec.schedule.plan import Estimate, Work


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


@dataclass(frozen=True)
class LoggedStep:
    """A line of a log."""

    work: Work
    seconds: float | None
    drafting_seconds: float = 0.0
    num_steps: int = 1


def read_log(path: Path) -> Iterator[LoggedStep]:
    """The steps of a log in their order."""
    with path.open() as lines:
        for line in lines:
            logged = json.loads(line)
            yield LoggedStep(
                Work(**logged["work"]),
                logged["seconds"],
                logged.get("drafting_seconds", 0.0),
                logged.get("num_steps", 1),
            )


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
    steps = read_log(parser.parse_args().log)
    for kind, errors in sorted(errors_of(Counted(), steps).items()):
        mean = sum(errors) / len(errors)
        print(f"{kind}: {100 * mean:.1f} % in {len(errors)} observations")


if __name__ == "__main__":
    main()
