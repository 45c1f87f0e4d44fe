"""What host and device did in a few steps, from the trace of torch's profiler."""

from __future__ import annotations

import gzip
import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.harness import plot, report

# Lanes of the picture, from top to bottom, by the profiler's categories.
LANES = HOST_WAITS, LAUNCHES, DEVICE = "host waits", "host launches", "device works"
# What the worker's profiler calls a step, and the files of its traces.
STEP, EXECUTE, TRACES = "user_annotation", "execute_", "rank*.json.gz"
DEVICE_CATEGORIES = {"kernel", "gpu_memcpy", "gpu_memset"}
HOST_CATEGORIES = {"cuda_runtime", "cuda_driver"}
LEAST_STEPS = 3
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
            "torch_profiler_with_stack": False,
            "torch_profiler_dump_cuda_time_total": False,
            "ignore_frontend": True,
        }
    }


def read_timeline(traces: Collection[Path]) -> dict[str, Any]:
    """Read the first rank's trace: of the steps between its first and its last one.

    Args:
        traces: that the workers of an engine wrote.

    Returns:
        ``lanes``: name -> spans of the middle two steps, from 0 on;
        ``per_step``: milliseconds in which the device works and in which it idles, in
        which the host waits for it, and how many launches there were.

    Raises:
        ValueError: there is no trace, or less than three steps in it, or nothing of a
            device.

    """
    if not traces:
        raise ValueError("the profiler wrote no trace; its warning is in the log")
    path = min(traces)
    with gzip.open(path) as file:
        events = [e for e in json.load(file)["traceEvents"] if e.get("ph") == "X"]
    steps = [e for e in events if e.get("cat") == STEP and EXECUTE in e["name"]]
    starts = sorted(event["ts"] / 1000 for event in steps)
    if len(starts) < LEAST_STEPS:
        raise ValueError(f"{path} holds {len(starts)} steps, {LEAST_STEPS} are needed")
    whole, number = Span(starts[0], starts[-1]), len(starts) - 1
    every = lanes_of(events, steps[0]["tid"])
    lanes = {name: within(joined(s, 0.0), whole) for name, s in every.items()}
    if not lanes[DEVICE]:
        raise ValueError(f"{path} holds nothing of a device")
    launches = [s for s in every[LAUNCHES] if whole.start <= s.start < whole.end]
    works = length(lanes[DEVICE])
    middle = (number - 1) // 2
    shown = Span(starts[middle], starts[min(middle + 2, number)])
    return {
        "per_step": {
            "device works": works / number,
            "device idles": (whole.end - whole.start - works) / number,
            "host waits": length(lanes[HOST_WAITS]) / number,
            "launches": len(launches) / number,
        },
        "lanes": {
            name: [
                [round(x - shown.start, 4) for x in span]
                for span in within(joined(spans), shown)
            ]
            for name, spans in lanes.items()
        },
    }


def lanes_of(
    events: Iterable[Mapping[str, Any]], thread: object
) -> dict[str, list[Span]]:
    """Sort the events of a trace into lanes, each by time.

    Of the host this thread alone counts: another one waits for tokens to be sent.
    """
    lanes: dict[str, list[Span]] = {name: [] for name in LANES}
    for event in events:
        lane, category = None, event.get("cat")
        if category in DEVICE_CATEGORIES:
            lane = DEVICE
        elif category in HOST_CATEGORIES and event["tid"] == thread:
            name = event["name"]
            if "Synchronize" in name:
                lane = HOST_WAITS
            elif "Launch" in name or "Memcpy" in name or "Memset" in name:
                lane = LAUNCHES
        if lane is not None:
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


def within(spans: Sequence[Span], shown: Span) -> list[Span]:
    """The spans, as far as they lie in another one."""
    cut = (Span(max(s.start, shown.start), min(s.end, shown.end)) for s in spans)
    return [span for span in cut if span.end > span.start]


def of_traced(rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The rows that have a timeline; older results have none."""
    return [row for row in rows if row.get("timeline")]


def tables(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Write what a step takes under the profiler; nothing where none was traced."""
    if not (traced := of_traced(rows)):
        return []
    return [
        "A step under the profiler:",
        report.table_of(traced, COLUMNS),
        f"![]({PICTURE})",
    ]


def draw(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Save a picture: a panel for each row of a table, a line for each lane."""
    traced = of_traced(rows)
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
