"""What a GPU's compiler would be asked for, and when, seen in Triton's interpreter.

A kernel is compiled anew for each of its forms: constants, types, and of arguments that
it specialises on whether they are 1, and whether 16 divides them or their address.
"""

from __future__ import annotations

from typing import Any

import torch
from triton import JITFunction
from triton.runtime.interpreter import InterpretedFunction

INT32_MAX = 2**31 - 1


class CompilerWatch:
    """Notes forms of kernels; those that are new after ``serve`` came too late."""

    def __init__(self) -> None:
        """Watch all kernels of this process from now on."""
        self.forms: set[tuple[object, ...]] = set()
        self.serving = False
        self.late: list[str] = []
        launch = InterpretedFunction.run

        def run(kernel: Any, *args: Any, **options: Any) -> Any:
            self.note(kernel, args, options)
            return launch(kernel, *args, **options)

        InterpretedFunction.run = run

    def serve(self) -> None:
        """Requests come from now on; none of them should wait for a compiler."""
        self.serving = True

    def note(self, kernel: Any, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        """Note the form of a launch."""
        given = {**dict(zip(kernel.arg_names, args, strict=False)), **options}
        del given["grid"], given["warmup"]
        # what the compiler knows of the arguments; the interpreter does not
        parameters = JITFunction(kernel.fn, **kernel.kwargs).params
        form = (
            kernel.__name__,
            *(form_of(known, given.pop(known.name)) for known in parameters),
            # warps and stages
            *sorted(given.items()),
        )
        if form in self.forms:
            return
        self.forms.add(form)
        if self.serving:
            self.late.append(self.nearest(form))

    def nearest(self, form: tuple[object, ...]) -> str:
        """Say what of a form differs from the known one that is most like it."""
        known = [f for f in self.forms if f[0] == form[0] and f != form]
        differences = [
            [(a, b) for a, b in zip(form, other, strict=True) if a != b]
            for other in known
        ]
        return f"{form[0]}: {min(differences, key=len, default='never run')}"


def form_of(parameter: Any, value: Any) -> object:
    """What of an argument decides for which form of a kernel the launch asks."""
    if parameter.is_constexpr:
        return parameter.name, value
    aligned = not parameter.do_not_specialize_on_alignment
    if isinstance(value, torch.Tensor):
        return parameter.name, value.dtype, aligned and value.data_ptr() % 16 == 0
    if isinstance(value, float) or value is None:
        return parameter.name, type(value)
    if parameter.do_not_specialize:
        return parameter.name, value > INT32_MAX
    return parameter.name, value == 1, aligned and value % 16 == 0, value > INT32_MAX
