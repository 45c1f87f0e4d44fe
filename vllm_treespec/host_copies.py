"""Copies of small arrays between host and device, for which the host does not wait."""

from __future__ import annotations

from collections.abc import Mapping

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


def is_on_cpu(tensor: Tensor) -> bool:
    """Whether a tensor lies in the host's memory."""
    return tensor.device.type == "cpu"


class HostCopy:
    """Columns of tensors on their way to the host, in one copy."""

    def __init__(self, tensors: Mapping[str, Tensor | None], wait: bool) -> None:
        """Launch the copy; what is None is left out.

        Args:
            tensors: int64 or float64, all on one device, [n] or [n, width].
            wait: whether the host waits for it.

        """
        given = {name: t for name, t in tensors.items() if t is not None}
        columns = [t.view(torch.int64).reshape(len(t), -1) for t in given.values()]
        self.shapes = {name: tuple(t.shape) for name, t in given.items()}
        self.floats = {name for name, t in given.items() if t.is_floating_point()}
        # PyTorch pins the memory that it copies to without waiting.
        self.together = torch.cat(columns, dim=1).to("cpu", non_blocking=not wait)

    def arrived(self) -> dict[str, np.ndarray]:
        """The numbers; to be called when the device is past the copy."""
        found, end = {}, 0
        for name, shape in self.shapes.items():
            begin, end = end, end + (shape[1] if len(shape) > 1 else 1)
            part = self.together.numpy()[:, begin:end]
            numbers = np.ascontiguousarray(part).reshape(shape)
            found[name] = numbers.view(np.float64) if name in self.floats else numbers
        return found


def on_host(tensors: Mapping[str, Tensor | None]) -> dict[str, np.ndarray]:
    """Bring tensors to the host, waiting for the device once; leave out None.

    Args:
        tensors: see ``HostCopy``.

    """
    given = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    if all(is_on_cpu(tensor) for tensor in given.values()):
        return {name: tensor.numpy() for name, tensor in given.items()}
    return HostCopy(given, wait=True).arrived()
