"""What only serves speed: an error in it ends no engine."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Concatenate, ParamSpec, Protocol, TypeVar

# vLLM prints the lines of loggers below "vllm".
logger = logging.getLogger("vllm.treespec")

P = ParamSpec("P")
T = TypeVar("T")


class Aid:
    """Something that only serves speed, such as a schedule or its counters.

    Its first error is logged with its traceback, and switches it off. What it would
    have given is replaced from then on, and decoding goes on.

    What decides about trees computes on every tensor-parallel rank from the same
    numbers. So its error comes on all ranks in the same call, they all switch it off
    there, and they go on drawing alike. What may come on one rank alone is not caught:
    memory that ran out, and ``SystemExit`` such as ``RanksDiffer``.
    """

    def __init__(self, name: str, without: str, *ending: type[Exception]) -> None:
        """Switch it on.

        Args:
            name: for the log.
            without: what is the case where it is off, for the log.
            ending: errors that are not caught, besides ``MemoryError``.

        """
        self.name = name
        self.without = without
        self.ending: tuple[type[Exception], ...] = (MemoryError, *ending)
        self.is_on = True

    def run(
        self, instead: T, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Call a function of it.

        Returns:
            what the function returns; ``instead`` where it fails, or it is off.

        Raises:
            MemoryError: memory ran out.

        """
        if not self.is_on:
            return instead
        try:
            return function(*args, **kwargs)
        except self.ending:
            raise
        except Exception as error:
            self.switch_off(error)
            return instead

    def switch_off(self, error: Exception) -> None:
        """Log the first error, and end it until the next start."""
        self.is_on = False
        logger.warning(
            "%s failed and is off until the next start: %s. Answers stay the same; "
            "please report this error",
            self.name,
            self.without,
            exc_info=error,
        )


class HasAid(Protocol):
    """Something that is an aid as a whole."""

    aid: Aid


S = TypeVar("S", bound=HasAid)


def aiding(
    method: Callable[Concatenate[S, P], None],
) -> Callable[Concatenate[S, P], None]:
    """Let a method that returns nothing run as a part of its object's aid."""

    @functools.wraps(method)
    def run(self: S, *args: P.args, **kwargs: P.kwargs) -> None:
        self.aid.run(None, method, self, *args, **kwargs)

    return run
