"""Which torch operations of a step are ours, and not vLLM's."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any
from unittest.mock import patch

from torch.utils._python_dispatch import TorchDispatchMode

import vllm_treespec
from tests.v2.engines import Engine

OURS = str(Path(vllm_treespec.__file__).parent)
VLLM = f"{Path('site-packages') / 'vllm'}/"
# of which a card sees one launch
TRITON = f"{Path('triton') / 'runtime'}/"


def caller() -> str | None:
    """Place in our code that called torch; None: vLLM did, or a kernel of ours."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        name = frame.f_code.co_filename
        if name.startswith(OURS):
            return f"{name[len(OURS) + 1 :]}:{frame.f_lineno}"
        if VLLM in name or TRITON in name:
            return None
        frame = frame.f_back
    return None


class Operations(TorchDispatchMode):
    """Counts our operations by their place and name."""

    def __init__(self) -> None:
        """Begin with none."""
        super().__init__()
        self.found: Counter[tuple[str, str]] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        place = caller()
        if place is not None:
            self.found[place, func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


@dataclass(frozen=True)
class CountedStep:
    """Our operations in a step."""

    # whether the tokens of the step before were not awaited
    rested: bool
    num_drafts: int
    # place in our code, name of the operation -> calls
    found: Counter[tuple[str, str]]


@contextmanager
def counted_steps(running: Engine) -> Iterator[list[CountedStep]]:
    """Count our operations in every step of an engine, from bind to sampling."""
    runner, operations = running.runner, Operations()
    steps: list[CountedStep] = []
    execute, sample = runner.execute_model, runner.sample_tokens

    def execute_model(*args: Any, **options: Any) -> Any:
        operations.found.clear()
        return execute(*args, **options)

    def sample_tokens(*args: Any, **options: Any) -> Any:
        output = sample(*args, **options)
        num_drafts = sum(map(len, runner.drafts.values()))
        found = Counter(operations.found)
        steps.append(CountedStep(len(runner.in_flight) > 1, num_drafts, found))
        return output

    with (
        operations,
        patch.object(runner, "execute_model", execute_model),
        patch.object(runner, "sample_tokens", sample_tokens),
    ):
        yield steps
