"""Two changes of Triton's interpreter (3.9): one of its errors, and its slowness."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from triton.language import core
from triton.runtime import interpreter


def install() -> None:
    """Change the interpreter for this process."""
    give_comparisons_their_type()
    interpreter._patch_builtin = patch_builtin


def give_comparisons_their_type() -> None:
    """Let comparisons be of type int1, not of the type of what they compare.

    Such a scalar becomes numbers when it meets a block, and then is no mask.
    """
    builder = interpreter.InterpreterBuilder
    stock = builder.binary_op

    def binary_op(self: Any, left: Any, right: Any, op: Any) -> Any:
        result = stock(self, left, right, op)
        if result.data.dtype == np.bool_:
            result.dtype = core.int1
        return result

    builder.binary_op = binary_op


def patch_builtin(package: Any, builder: Any, scope: Any) -> None:
    """Put interpreted functions in the place of a package's own, as stock code does.

    Stock code looks through the package at every call of a Triton function.
    """
    names = builtins_of(package)
    if names and core.is_builtin(getattr(package, names[0])):
        for name in names:
            member = getattr(package, name)
            interpreter._patch_attr(package, name, member, builder, scope)


@cache
def builtins_of(package: Any) -> list[str]:
    """Names of a package's functions that the interpreter replaces."""
    return [name for name in dir(package) if core.is_builtin(getattr(package, name))]
