"""Whether files of weights are whole and as wanted, read from their headers alone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from safetensors import SafetensorError, safe_open
from torch import Tensor


class TensorHeader(NamedTuple):
    """What a file says of a tensor before its numbers."""

    shape: tuple[int, ...]
    # not whole numbers or flags
    is_floating: bool

    @classmethod
    def of(cls, tensor: Tensor) -> TensorHeader:
        """The header of a tensor in memory."""
        return cls(tuple(tensor.shape), tensor.is_floating_point())


def weights_problem(path: Path) -> str | None:
    """What is wrong with a safetensors file; None when its size fits its header."""
    try:
        with safe_open(path, "pt"):
            return None
    except (OSError, SafetensorError) as error:
        return f"{path} is cut short or is no safetensors file ({error})"


def tensor_headers(path: Path) -> dict[str, TensorHeader]:
    """Headers of the tensors of a safetensors file, by name."""
    headers = {}
    with safe_open(path, "pt") as file:
        for name in list(file.keys()):
            part = file.get_slice(name)
            # F32, BF16, F8_E4M3; the others are I64, U8, BOOL
            is_floating = "F" in part.get_dtype()
            headers[name] = TensorHeader(tuple(part.get_shape()), is_floating)
    return headers


def listed(names: Iterable[str]) -> str:
    """Names of tensors for a message, at most five."""
    ordered = sorted(names)
    more = f" and {len(ordered) - 5} more" if len(ordered) > 5 else ""
    return (", ".join(ordered[:5]) or "none") + more


def first_misfit(
    wanted: Mapping[str, TensorHeader], found: Mapping[str, TensorHeader]
) -> str | None:
    """Name the first tensor of another shape or kind than wanted; None: there is none.

    Both have the same names, ``found`` perhaps more.
    """
    for name, header in wanted.items():
        shape, is_floating = found[name]
        if shape != header.shape:
            return (
                f"{name} has the shape {list(shape)}, and config.json says "
                f"{list(header.shape)}"
            )
        if is_floating != header.is_floating:
            kinds = {True: "fractions", False: "whole numbers"}
            return f"{name} holds {kinds[is_floating]}, not {kinds[not is_floating]}"
    return None
