"""Whether the layers of a model have our attention."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol


class AttentionLayer(Protocol):
    """A layer, as much as is checked of it."""

    @property
    def impl(self) -> object:
        """Its attention."""


def check_attention(
    layers: Mapping[str, AttentionLayer], names: Iterable[str], expected: type
) -> None:
    """Check that the layers of these names have our attention.

    vLLM chooses attention once in a process; an engine that ran there before ours
    leaves its choice, and stock attention would read trees as chains.

    Raises:
        ValueError: naming the remedy.

    """
    for name in names:
        if not isinstance(layers[name].impl, expected):
            raise ValueError(
                "draft trees came too late: another engine chose this process's "
                "attention; start the engine in a process of its own, or unset "
                "VLLM_ENABLE_V1_MULTIPROCESSING"
            )
