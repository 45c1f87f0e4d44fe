"""Whether files of weights are whole, and what they hold can be weights."""

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def weights_problem(path: Path) -> str | None:
    """What is wrong with a safetensors file; None when its size fits its header."""
    try:
        with safe_open(path, "pt"):
            return None
    except (OSError, SafetensorError) as error:
        return f"{path} is cut short or is no safetensors file ({error})"


def misfit(name: str, found: Tensor, own: Tensor) -> str | None:
    """Why a tensor of a file cannot be one of a head; None when it can.

    Args:
        name: in the file.
        found: what the file holds.
        own: the head's, as its config.json says.

    """
    if found.shape != own.shape:
        return (
            f"{name} has the shape {list(found.shape)}, and config.json says "
            f"{list(own.shape)}"
        )
    if own.is_floating_point() and found.dtype not in FLOATS:
        return f"{name} is {found.dtype}, and weights are floating-point numbers"
    if first_not_finite({name: found}):
        return f"{name} holds NaN or infinity"
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
