"""Finds operations for which a host waits for its GPU, without a GPU."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from vllm_treespec.proposers import ProposerInputs
from vllm_treespec.sampling.laws import SamplingTensors
from vllm_treespec.scorers import TargetLogits
from vllm_treespec.trees.tree import Draws, TreeBatch

OURS = TreeBatch | Draws | TargetLogits | SamplingTensors | ProposerInputs
WAITING = {
    "_local_scalar_dense",
    "_unique2",
    "equal",
    "is_nonzero",
    "item",
    "masked_select",
    "nonzero",
    "repeat_interleave",
}


class NoWaiting(TorchDispatchMode):
    """Refuses operations for which the host would wait for a device."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name = func.overloadpacket.__name__
        tensors = [
            leaf for leaf in pytree.tree_leaves(args) if isinstance(leaf, Tensor)
        ]
        is_mask = name.startswith("index") and any(
            index.dtype == torch.bool
            for index in pytree.tree_leaves(args[1:2])
            if isinstance(index, Tensor)
        )
        is_mixed = len({tensor.device for tensor in tensors}) > 1
        given = kwargs or {}
        is_blocking = (
            name == "_to_copy"
            and given.get("device", tensors[0].device) != tensors[0].device
            and not given.get("non_blocking")
        )
        if is_mask or is_mixed or is_blocking or name in WAITING:
            raise RuntimeError(f"{func} makes the host wait")
        return func(*args, **(kwargs or {}))


class OnDevice(NoWaiting):
    """Refuses what a CUDA graph cannot hold: numbers that come from the host, too."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        for leaf in pytree.tree_leaves((args, kwargs)):
            if isinstance(leaf, Tensor) and not leaf.is_meta:
                raise RuntimeError(f"{func} reads a tensor of the host")
        return super().__torch_dispatch__(func, types, args, kwargs)


def on_meta(value: Any) -> Any:
    """Tensors without values: they cannot be read, nor meet one of another device."""
    if isinstance(value, Tensor):
        return value.to("meta")
    if isinstance(value, OURS):
        named = {field.name: getattr(value, field.name) for field in fields(value)}
        return type(value)(**{name: on_meta(part) for name, part in named.items()})
    return value
