"""Checks the running vLLM against the seam table, at start-up."""

from __future__ import annotations

from collections.abc import Callable

from packaging.version import Version

from vllm_treespec.engine.seams.seam import Seam
from vllm_treespec.engine.seams.table import SEAMS

MIN_VLLM, BELOW_VLLM = "0.32", "0.34"


class SeamError(RuntimeError):
    """The installed vLLM lacks something that draft trees need."""


def supported(version: str) -> bool:
    """Whether a vLLM version is one that draft trees were written for."""
    release = Version(version).release
    return Version(MIN_VLLM).release <= release < Version(BELOW_VLLM).release


def check_seams(device: str, exists: Callable[[Seam], bool] = Seam.exists) -> None:
    """Check that the running vLLM has all functions and classes we need.

    Args:
        device: ``"cpu"`` or ``"cuda"``, whose seams are needed.
        exists: whether a seam is there; ``Seam.exists`` imports it, which may fail on
            a machine without the device.

    Raises:
        SeamError: naming the version or the missing seam, and the remedy.

    """
    import vllm

    if not supported(vllm.__version__):
        raise SeamError(
            f"vLLM {vllm.__version__} is not supported by vllm_treespec; "
            f"install vllm>={MIN_VLLM},<{BELOW_VLLM}"
        )
    for seam in SEAMS:
        needed = seam.needed_on(device) and seam.needed_in(vllm.__version__)
        if needed and not seam.on_instances and not exists(seam):
            raise SeamError(
                f"vLLM {vllm.__version__} has no {seam.name} "
                f"({seam.purpose}); reinstall vllm>={MIN_VLLM},<{BELOW_VLLM}"
            )
