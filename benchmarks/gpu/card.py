"""The card that results come from: what it is, how fast it copies, and versions."""

from __future__ import annotations

import platform
import shlex
import statistics
import sys
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from benchmarks import provenance

COPY_BYTES = 2 * 2**30


class NoCardError(RuntimeError):
    """There is no CUDA device; the message is one sentence."""


def require_card() -> None:
    """Refuse to measure where there is no card.

    Raises:
        NoCardError: when torch finds no CUDA device.

    """
    if not torch.cuda.is_available():
        raise NoCardError(
            "this measures a GPU and torch finds no CUDA device here; run it on a "
            "machine with one, or try the code with --smoke"
        )


def describe_card() -> dict[str, Any]:
    """Name, compute capability, memory in GiB, multiprocessors and L2 cache in MiB."""
    found = torch.cuda.get_device_properties(0)
    return {
        "name": found.name,
        "capability": f"{found.major}.{found.minor}",
        "memory_gib": round(found.total_memory / 2**30, 1),
        "multiprocessors": found.multi_processor_count,
        "l2_mib": round(found.L2_cache_size / 2**20),
        "driver_cuda": torch.version.cuda,
    }


def versions() -> dict[str, str]:
    """Versions that decide a GPU result, beside those of every benchmark."""
    found = {"python": platform.python_version(), **provenance.versions()}
    for name in ("triton", "flashinfer-python"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    # says for which CUDA it was built, which the package's metadata may not
    return {**found, "torch": torch.__version__}


def origin(module: str, told_commit: str) -> dict[str, Any]:
    """Say where results of ``python -m MODULE`` come from, the card included.

    Args:
        module: of the command.
        told_commit: from the command line; empty: ask git.

    """
    found = {
        "command": shlex.join(["python", "-m", module, *sys.argv[1:]]),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": told_commit or provenance.commit(),
        "versions": versions(),
        "machine": provenance.machine(),
    }
    if torch.cuda.is_available():
        found["card"] = describe_card()
    return found


def event_times_ms(
    sides: Sequence[Callable[[], Any]], repeats: int, flush: torch.Tensor
) -> list[list[float]]:
    """Times of calls on the card, by CUDA events, the sides in turn.

    Before each call ``flush`` is overwritten: the L2 cache holds none of the call's
    data, and the host has enqueued the call before the card gets to it.

    Args:
        sides: what to call.
        repeats: calls of each.
        flush: a buffer several times as large as the L2 cache.

    Returns:
        per side, milliseconds of each call.

    """
    events = [
        [
            [torch.cuda.Event(enable_timing=True) for _ in range(2)]
            for _ in range(repeats)
        ]
        for _ in sides
    ]
    for turn in range(repeats):
        for side, pairs in zip(sides, events, strict=True):
            flush.zero_()
            start, end = pairs[turn]
            start.record()
            side()
            end.record()
    torch.cuda.synchronize()
    return [[start.elapsed_time(end) for start, end in pairs] for pairs in events]


def flush_buffer() -> torch.Tensor:
    """A buffer whose overwriting empties the L2 cache and takes a while: 1 GiB."""
    return torch.empty(2**30, dtype=torch.uint8, device="cuda")


def copy_bandwidth(repeats: int = 20) -> float:
    """Measured bandwidth of a large copy on the card, GB/s, bytes read and written."""
    source = torch.zeros(COPY_BYTES, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    (times,) = event_times_ms(
        [lambda: target.copy_(source)], repeats, flush_buffer()[: 2**20]
    )
    return 2 * COPY_BYTES / statistics.median(times) / 1e6
