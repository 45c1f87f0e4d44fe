"""What host and device did in a few steps, from the trace of torch's profiler."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.harness import plot, report

# Lanes of the picture, from top to bottom, by the profiler's categories.
LANES = HOST_WAITS, LAUNCHES, DEVICE = "host waits", "host launches", "device works"
DEVICE_CATEGORIES = {"kernel", "gpu_memcpy", "gpu_memset"}
HOST_CATEGORIES = {"cuda_runtime", "cuda_driver"}
# Milliseconds between spans of a lane that are shown as one.
JOINED = 0.003
PICTURE = "timeline.png"
COLUMNS: report.Columns = {
    "side": "{side}",
    "batch": "{batch}",
    "device works ms": "{timeline[per_step][device works]:.2f}",
    "device idles ms": "{timeline[per_step][device idles]:.2f}",
    "host waits ms": "{timeline[per_step][host waits]:.2f}",
    "launches": "{timeline[per_step][launches]:.0f}",
}


class Span(NamedTuple):
    """Something that took time, in milliseconds."""

    start: float
    end: float


def profiler_arguments(folder: Path) -> dict[str, Any]:
    """Arguments of an engine whose worker can write a trace into this folder."""
    return {
        "profiler_config": {
            "profiler": "torch",
            "torch_profiler_dir": str(folder),
            # the host's own operations would make the host slower
            "torch_profiler_activities": ["CUDA"],
            "torch_profiler_with_stack": False,
            "torch_profiler_dump_cuda_time_total": False,
            "ignore_frontend": True,
        }
    }


def read_timeline(folder: Path, num_steps: int) -> dict[str, Any]:
    """Read the newest trace of a folder.

    Args:
        folder: of the traces.
        num_steps: that were traced.

    Returns:
        ``lanes``: name -> spans of the middle two steps, from 0 on;
        ``per_step``: milliseconds in which the device works and in which it idles, in
        which the host waits for it, and how many launches there were.

    Raises:
        ValueError: there is no trace, or nothing of a device in it.

    """
    paths = sorted(folder.glob("*.json.gz"), key=lambda path: path.stat().st_mtime)
    if not paths:
        raise ValueError(f"{folder} holds no trace of the profiler")
    with gzip.open(paths[-1]) as file:
        events = json.load(file)["traceEvents"]
    lanes = lanes_of(events)
    if not lanes[DEVICE]:
        raise ValueError(f"{paths[-1]} holds nothing of a device")
    begin, end = lanes[DEVICE][0].start, max(span.end for span in lanes[DEVICE])
    works = length(joined(lanes[DEVICE], 0.0))
    middle, step = (begin + end) / 2, (end - begin) / num_steps
    shown = Span(middle - step, middle + step)
    return {
        "per_step": {
            "device works": works / num_steps,
            "device idles": (end - begin - works) / num_steps,
            "host waits": length(lanes[HOST_WAITS]) / num_steps,
            "launches": len(lanes[LAUNCHES]) / num_steps,
        },
        "lanes": {name: within(joined(spans), shown) for name, spans in lanes.items()},
    }


def lanes_of(events: Iterable[Mapping[str, Any]]) -> dict[str, list[Span]]:
    """Sort the events of a trace into lanes, each by time."""
    lanes: dict[str, list[Span]] = {name: [] for name in LANES}
    for event in events:
        lane, category = None, event.get("cat")
        if category in DEVICE_CATEGORIES:
            lane = DEVICE
        elif category in HOST_CATEGORIES:
            name = event["name"]
            if "Synchronize" in name:
                lane = HOST_WAITS
            elif "Launch" in name or "Memcpy" in name or "Memset" in name:
                lane = LAUNCHES
        if lane is not None and event.get("ph") == "X":
            start = event["ts"] / 1000
            lanes[lane].append(Span(start, start + event["dur"] / 1000))
    return {name: sorted(spans) for name, spans in lanes.items()}


def joined(spans: Sequence[Span], gap: float = JOINED) -> list[Span]:
    """Join spans that overlap, or between which there is less than a gap."""
    found: list[Span] = []
    for span in spans:
        if found and span.start - found[-1].end <= gap:
            found[-1] = Span(found[-1].start, max(found[-1].end, span.end))
        else:
            found.append(span)
    return found


def length(spans: Sequence[Span]) -> float:
    """Sum of their times."""
    return sum(span.end - span.start for span in spans)


def within(spans: Sequence[Span], shown: Span) -> list[list[float]]:
    """Starts and ends of the spans that are shown, from 0 on."""
    cut = (Span(max(s.start, shown.start), min(s.end, shown.end)) for s in spans)
    kept = (span for span in cut if span.end > span.start)
    return [[round(x - shown.start, 4) for x in span] for span in kept]


def tables(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Write what a step takes under the profiler; nothing where none was traced."""
    if not (traced := [row for row in rows if row.get("timeline")]):
        return []
    return [
        "A step under the profiler:",
        report.table_of(traced, COLUMNS),
        f"![]({PICTURE})",
    ]


def draw(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Save a picture: a panel for each row of a table, a line for each lane."""
    traced = [row for row in rows if row.get("timeline")]
    if not traced or plot.seaborn(path) is None:
        return
    from matplotlib import pyplot

    size = 11, 1.3 * len(traced)
    figure, panels = pyplot.subplots(
        len(traced), figsize=size, sharex=True, squeeze=False
    )
    for axes, row in zip(panels[:, 0], traced, strict=True):
        for place, lane in enumerate(reversed(LANES)):
            spans = row["timeline"]["lanes"][lane]
            bars = [(start, end - start) for start, end in spans]
            axes.broken_barh(bars, (place - 0.4, 0.8), color=f"C{place}")
        axes.set_yticks(range(len(LANES)), LANES[::-1])
        axes.set_title("{shape}, {side}, batch {batch}".format(**row), loc="left")
    panels[-1, 0].set_xlabel("ms, two steps")
    plot.save(figure, path)
