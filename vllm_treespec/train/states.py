"""The target's hidden states of a text, read from the teacher's shards on disk."""

from bisect import bisect_right
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from vllm_treespec.sources.base import FINAL_LAYER

PREFIX = "hidden_"


def state_name(layer: int) -> str:
    """Name of a layer's tensor in a shard."""
    return f"{PREFIX}{'final' if layer == FINAL_LAYER else layer}"


def layer_of(name: str) -> int:
    """The layer whose tensor has this name."""
    layer = name.removeprefix(PREFIX)
    return FINAL_LAYER if layer == "final" else int(layer)


def is_state(name: str) -> bool:
    """Whether a shard's tensor of this name holds hidden states."""
    return name.startswith(PREFIX)


class StateFiles:
    """Hidden states of all tokens of a text; a read touches only what it returns."""

    def __init__(self, shards: list[Path], offsets: list[int]) -> None:
        """Open the shards.

        Args:
            shards: in text order.
            offsets: number of the first token of each shard, and of all tokens.

        """
        self.offsets = offsets
        self.files = [safe_open(shard, "pt") for shard in shards]

    def has(self, layer: int) -> bool:
        """Whether all shards hold this layer's hidden states."""
        return all(state_name(layer) in file.keys() for file in self.files)  # noqa: SIM118

    def read(self, layers: tuple[int, ...], first: int, end: int) -> Tensor:
        """Hidden states of tokens ``first`` to ``end`` of one conversation.

        Returns:
            bfloat16 [end - first, len(layers) * target_hidden], layer beside layer.

        """
        shard = bisect_right(self.offsets, first) - 1
        offset = self.offsets[shard]
        file = self.files[shard]
        parts = [
            file.get_slice(state_name(layer))[first - offset : end - offset]
            for layer in layers
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)
