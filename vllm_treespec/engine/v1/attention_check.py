"""Whether the layers of a model have our attention."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm_treespec.engine.v1.host import V1Runner


def check_attention(runner: V1Runner, layers: Iterable[str], expected: type) -> None:
    """Check that layers have our attention.

    vLLM chooses attention once in a process; an engine that ran there before ours
    leaves its choice, and stock attention would read trees as chains.

    Raises:
        ValueError: naming the remedy.

    """
    context = runner.compilation_config.static_forward_context
    for name in layers:
        if not isinstance(context[name].impl, expected):
            raise ValueError(
                "draft trees came too late: another engine chose this process's "
                "attention; start the engine in a process of its own, or unset "
                "VLLM_ENABLE_V1_MULTIPROCESSING"
            )
