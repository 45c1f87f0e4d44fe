"""Copies of small arrays from the host to a device, for which the host never waits."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def on_device(numbers: np.ndarray | Tensor, device: torch.device) -> Tensor:
    """Copy numbers of the host to a device; the same tensor where they lie there.

    The host goes on while the device still works on what came before. Pageable memory
    is read before this returns.
    """
    tensor = numbers if isinstance(numbers, Tensor) else torch.from_numpy(numbers)
    return tensor.to(device, non_blocking=True)
