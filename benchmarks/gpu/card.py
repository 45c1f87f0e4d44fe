"""The card that results come from, times on it, and options of its experiments."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import torch
import typer

from benchmarks.harness import options, provenance

COPY_BYTES = 2 * 2**30

Numbers = Annotated[str, typer.Option(help="Comma-separated.")]
Shapes = Annotated[str, typer.Option(help="Some of 8b, 70b-tp8.")]
Commit = Annotated[str, typer.Option(help="To note, where git does not know it.")]
Context = Annotated[int, typer.Option(min=1, help="Tokens of each prompt.")]
Rates = Annotated[str, typer.Option(help="Chances of a node below an accepted one.")]
Extra = Annotated[
    str, typer.Option(help="More arguments of vLLM for all sides, as JSON.")
]
Smoke = Annotated[
    bool, typer.Option("--smoke", help="Tiny cells on this machine; nothing is kept.")
]


def require_card() -> None:
    """Refuse to measure where torch finds no CUDA device, with a ValueError."""
    if not torch.cuda.is_available():
        raise ValueError(
            "this measures a GPU and torch finds no CUDA device here; run it on a "
            "machine with one, or try the code with --smoke"
        )


def card_and_versions() -> dict[str, Any]:
    """Versions that decide a GPU result, and the card, if there is one.

    Its memory is in GiB, its L2 cache in MiB.
    """
    # torch itself says for which CUDA it was built; the package's metadata may not
    versions = {**provenance.versions(), "torch": torch.__version__}
    if not torch.cuda.is_available():
        return {"versions": versions}
    device = torch.cuda.get_device_properties(0)
    card = {
        "name": device.name,
        "capability": f"{device.major}.{device.minor}",
        "memory_gib": round(device.total_memory / 2**30, 1),
        "multiprocessors": device.multi_processor_count,
        "l2_mib": round(device.L2_cache_size / 2**20),
        "driver_cuda": torch.version.cuda,
    }
    return {"versions": versions, "card": card}


def origin(experiment: str, commit: str) -> dict[str, Any]:
    """Say where results come from, the card included; empty commit: ask git."""
    more = {"commit": commit} if commit else {}
    return provenance.provenance(experiment, **card_and_versions(), **more)


@contextmanager
def results_folder(out: Path, smoke: bool) -> Iterator[Path]:
    """Yield the folder for results; a smoke test's is printed and removed."""
    if not smoke:
        yield out
        return
    with TemporaryDirectory() as folder:
        try:
            yield Path(folder)
        finally:
            for text in Path(folder).glob("results.md"):
                options.console.print(text.read_text(), markup=False)


def event_times_ms(
    sides: Sequence[Callable[[], Any]], repeats: int
) -> list[list[float]]:
    """Times of calls on the card, by CUDA events, the sides in turn.

    Before each call 1 GiB is overwritten: the L2 cache holds none of the call's data,
    and the host has enqueued the call before the card gets to it (the buffer of
    ``triton.testing.do_bench`` is too small for that). Returns milliseconds of each
    call, per side.
    """
    flush = torch.empty(2**30, dtype=torch.uint8, device="cuda")
    events: list[list[tuple[Any, Any]]] = [[] for _ in sides]
    for _ in range(repeats):
        for side, pairs in zip(sides, events, strict=True):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            flush.zero_()
            start.record()
            side()
            end.record()
            pairs.append((start, end))
    torch.cuda.synchronize()
    return [[start.elapsed_time(end) for start, end in pairs] for pairs in events]


def copy_bandwidth() -> float:
    """Measured bandwidth of a large copy on the card, GB/s, bytes read and written."""
    source = torch.zeros(COPY_BYTES, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    (times,) = event_times_ms([lambda: target.copy_(source)], repeats=20)
    return 2 * COPY_BYTES / statistics.median(times) / 1e6
