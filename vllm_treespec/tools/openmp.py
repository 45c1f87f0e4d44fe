"""Intel's OpenMP, which vLLM asks to be preloaded where draft trees run on a CPU."""

from __future__ import annotations

import os
import platform
import sys
from pathlib import Path

from rich.console import Console

NAME = "libiomp5.so"


def intel_openmp() -> Path | None:
    """Path of the library in this environment, or None where it is not installed."""
    library = Path(sys.prefix) / "lib" / NAME
    return library if library.is_file() else None


def report(console: Console) -> None:
    """Print on an x86-64 CPU whether the library is preloaded, and how to do it."""
    from vllm.platforms import current_platform

    if not current_platform.is_cpu() or platform.machine() != "x86_64":
        return
    preloaded = [p for p in os.environ.get("LD_PRELOAD", "").split(":") if NAME in p]
    library = intel_openmp()
    if any(Path(path).is_file() for path in preloaded):
        console.print("[green]Intel's OpenMP is preloaded[/]")
    elif library is None:
        console.print(
            f"[yellow]Intel's OpenMP is not installed[/], {NAME}: answers take "
            "longer on busy cores; pip install intel-openmp, then run treespec doctor "
            "again",
            soft_wrap=True,
        )
    else:
        console.print(
            "[yellow]Intel's OpenMP is not preloaded:[/] answers take longer on busy "
            f"cores; start with LD_PRELOAD={library} vllm serve ...",
            soft_wrap=True,
        )
