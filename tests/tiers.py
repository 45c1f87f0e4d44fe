"""What `make test` leaves out: tests that are thorough, run by `make test-all`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import product
from typing import Any

import pytest


def grid(*axes: Iterable[Any], quick: Callable[..., bool]) -> list[Any]:
    """All combinations of some parameters; those that are not quick are thorough."""
    return [
        pytest.param(*case, marks=() if quick(*case) else pytest.mark.thorough)
        for case in product(*axes)
    ]


def cases(all_cases: Iterable[Any], quick: Iterable[Any]) -> list[Any]:
    """Values of one parameter, or tuples of several; all but the quick are thorough."""
    quick = list(quick)
    return [
        case
        if case in quick
        else pytest.param(
            *(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.thorough
        )
        for case in all_cases
    ]
