"""Lossless tree speculative decoding through stock vLLM."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from vllm_treespec.config.base import MethodConfig

__version__ = "0.2.0"

M = TypeVar("M", bound="type[MethodConfig]")


def register_method(method: M) -> M:
    """Let spec-configs of this process name a method; also a decorator of its class.

    Args:
        method: the spec-config's class. Its key ``method`` holds the name.

    Raises:
        SpecConfigError: vLLM's processes cannot import the class, or the name is taken.

    """
    # Heavy modules are imported when they are needed: `treespec -h` does not wait.
    from vllm_treespec.config import methods

    return methods.register_method(method)
