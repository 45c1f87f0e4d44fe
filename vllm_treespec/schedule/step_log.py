"""Steps in the log, at level DEBUG: what each did and took, to judge estimates by."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from vllm_treespec.schedule.plan import StepResult, Work

# vLLM prints the lines of loggers below "vllm".
logger = logging.getLogger("vllm.treespec.steps")
BEGINNING = "step {"


@dataclass(frozen=True)
class LoggedStep:
    """What a log says of a step; see ``StepResult``."""

    work: Work
    seconds: float | None
    drafting_seconds: float = 0.0
    num_steps: int = 1


def log_step(result: StepResult) -> None:
    """Write a line for a step, if anybody reads such lines."""
    if not logger.isEnabledFor(logging.DEBUG):
        return
    parts = {
        "work": {name: float(value) for name, value in result.work._asdict().items()},
        "seconds": result.seconds,
        "drafting_seconds": result.drafting_seconds,
        "num_steps": result.num_steps,
        "claimed": {str(source): sum(of) for source, of in result.claimed.items()},
        "accepted": sum(result.num_accepted),
    }
    logger.debug("step %s", json.dumps(parts))


def read_steps(lines: Iterable[str]) -> Iterator[LoggedStep]:
    """The steps of a log in their order; its other lines are left out."""
    for line in lines:
        _, found, rest = line.partition(BEGINNING)
        if not found:
            continue
        logged = json.loads("{" + rest)
        work = logged["work"]
        kind = {"requests": int(work["requests"]), "sampled": bool(work["sampled"])}
        yield LoggedStep(
            Work(**{**work, **kind}),
            logged["seconds"],
            logged["drafting_seconds"],
            logged["num_steps"],
        )
