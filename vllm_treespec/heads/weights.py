"""Whether files of weights are whole, and what they hold can be weights."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


class TensorHeader(NamedTuple):
    """What a tensor is, but for its numbers."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: Tensor) -> "TensorHeader":
        """The header of a tensor in memory."""
        return cls(tuple(tensor.shape), tensor.dtype)


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
            shape = tuple(part.get_shape())
            # no number is read, but for those of a scalar
            dtype = part[:0].dtype if shape else part[...].dtype
            headers[name] = TensorHeader(shape, dtype)
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
    for name, own in wanted.items():
        shape, dtype = found[name]
        if shape != own.shape:
            return (
                f"{name} has the shape {list(shape)}, and config.json says "
                f"{list(own.shape)}"
            )
        if own.dtype.is_floating_point and dtype not in FLOATS:
            return f"{name} is {dtype}, and weights are floating-point numbers"
        if dtype.is_floating_point and not own.dtype.is_floating_point:
            return f"{name} is {dtype}, and ids of tokens are whole numbers"
    return None


def first_not_finite(tensors: Mapping[str, Tensor]) -> str | None:
    """Name of the first tensor with NaN or infinity; None: all numbers are finite."""
    for name, tensor in tensors.items():
        if not tensor.is_floating_point() or not tensor.numel():
            continue
        # both are NaN where any number is
        if not torch.stack(tensor.aminmax()).isfinite().all():
            return name
    return None
