"""The timeline of a step, from a trace as torch's profiler writes it."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu.step import Work, named_sides, tables
from benchmarks.gpu.timeline import DEVICE, HOST_WAITS, PICTURE, draw, read_timeline

NUM_STEPS = 4


def event(category: str, name: str, start: float, took: float) -> dict[str, Any]:
    """A complete event; microseconds."""
    place = {"ph": "X", "tid": 1, "cat": category, "name": name}
    return {**place, "ts": start, "dur": took}


def written(folder: Path, events: list[dict[str, Any]]) -> Path:
    """Write a trace."""
    path = folder / "rank0.1.pt.trace.json.gz"
    with gzip.open(path, "wt") as file:
        json.dump({"traceEvents": events}, file)
    return path


def steps() -> list[dict[str, Any]]:
    """Steps of 10 ms: a graph of two kernels at once, a copy, and a wait.

    The device has worked before, and goes on behind the last one.
    """
    found: list[dict[str, Any]] = [{"ph": "M", "name": "process_name", "args": {}}]
    found += [event("kernel", "of a step before", 1e6 - 9000, 4000)]
    for number in range(NUM_STEPS):
        begin = 1e6 + 10_000 * number
        found += [
            event(
                "user_annotation", "execute_context_0(0)_generation_1(1)", begin, 9e3
            ),
            event("user_annotation", "something else", begin + 3000, 9),
            event("cuda_runtime", "cudaGraphLaunch", begin, 50),
            event("kernel", "attention", begin, 6000),
            event("kernel", "beside it", begin + 4000, 3000),
            event("gpu_memcpy", "Memcpy DtoH", begin + 9000, 1000),
            event("cuda_runtime", "cudaEventSynchronize", begin + 100, 8000),
            event("cuda_runtime", "cudaStreamIsCapturing", begin + 100, 5),
            # of another thread
            event("cuda_runtime", "cudaEventSynchronize", begin, 10_000) | {"tid": 2},
            event("cpu_op", "aten::add", begin, 9999),
        ]
    return found


def test_times_of_a_step(tmp_path: Path) -> None:
    """Red when kernels that run at once count twice, or work of the host as a wait."""
    found = read_timeline([written(tmp_path, steps())])
    expected = {"device works": 8, "device idles": 2, "host waits": 8, "launches": 1}
    assert found["per_step"] == pytest.approx(expected)
    shown = found["lanes"][DEVICE]
    assert shown[0] == [0.0, 7.0]
    # what follows without a gap is one
    assert shown[1] == [9.0, 17.0]
    assert shown[-1] == [19.0, 20.0]
    assert len(found["lanes"][HOST_WAITS]) == 2


def test_traces_without_a_device_are_refused(tmp_path: Path) -> None:
    """Red when a picture is drawn of nothing."""
    with pytest.raises(ValueError, match="wrote no trace"):
        read_timeline([])
    with pytest.raises(ValueError, match="holds 0 steps, 3 are needed"):
        read_timeline([written(tmp_path, [event("kernel", "one", 0, 1)])])
    host = ("cuda_runtime", "user_annotation")
    nothing = [each for each in steps() if each.get("cat") in host]
    with pytest.raises(ValueError, match="nothing of a device"):
        read_timeline([written(tmp_path, nothing)])
    with pytest.raises(ValueError, match="write 0, or 5 and more"):
        Work("steps", [1], [0.5], 20, 5, 0.0, {}, traced=2)


def test_the_report_shows_it(tmp_path: Path) -> None:
    """Red when the table or the picture leaves a traced side out."""
    timeline = read_timeline([written(tmp_path, steps())])
    row: dict[str, Any] = {"shape": "8b", "side": "plain-default", "batch": 1}
    numbers = ("acceptance", "step_ms", "forward_ms", "outside_ms", "acceptance_length")
    row |= dict.fromkeys(numbers) | {"tokens_per_s": 1.0, "stage_ms": {}, "over": {}}
    row |= {"chosen": {}, "timeline": timeline}
    parts = tables([row, {**row, "side": "ours", "timeline": None}])
    assert "8.00" in "".join(parts)
    assert f"![]({PICTURE})" in parts
    draw([row], tmp_path / PICTURE)
    assert (tmp_path / PICTURE).stat().st_size > 0


def test_engines_that_are_traced_have_a_profiler(tmp_path: Path) -> None:
    """Red when a traced engine has no profiler, or another one has."""
    (side,) = named_sides("8", "ours-v2-8")
    for traced in (0, 6):
        work = Work("steps", [1], [0.5], 20, 5, 0.0, {}, traced=traced)
        engine = work.side(side, "tiny", tmp_path).engine
        assert ("profiler_config" in engine) == bool(traced)
        (cell,) = work.cells("tiny", side)
        assert cell.options.get("traced", 0) == traced
        assert ("traced" in work.settings()) == bool(traced)
