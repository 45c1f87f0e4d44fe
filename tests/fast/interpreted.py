"""Triton's interpreter for kernels that were imported for the real compiler.

``TRITON_INTERPRET`` is read where a kernel is defined, Triton's own helpers included.
A test module cannot know who imported those before it, so it swaps what was defined,
and swaps it back: nothing stays behind for other tests or their subprocesses.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

import pytest
import triton.language
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction


@contextmanager
def interpreted(*modules: ModuleType) -> Iterator[None]:
    """Run the kernels of these modules in the interpreter, on CPU tensors."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        for module in (triton.language, triton.language.standard, *modules):
            for name, value in vars(module).items():
                if isinstance(value, JITFunction):
                    patch.setattr(module, name, InterpretedFunction(value.fn))
        yield
