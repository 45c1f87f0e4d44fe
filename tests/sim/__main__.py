"""Judge the adaptive scheduler by all scenarios: ``python -m tests.sim``."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean

from tests.sim.best import best_of
from tests.sim.scenarios import Scenario
from tests.sim.table import SCENARIOS
from tests.sim.world import MAX_TREES, Record, World, run
from vllm_treespec.schedule.plan import MAX_SLOWDOWN
from vllm_treespec.schedule.scheduler import AdaptiveScheduler

# Steps of the beginning, and their weight in a score.
FIRST_STEPS, FIRST_WEIGHT = 200, 0.25

# whole, first: means over the runs of a scenario; worst: the least share of a run; p99:
# of 100 steps the longest but one, in plain steps
Scores = dict[str, dict[str, float]]


def slowdowns(world: World, record: Record) -> list[float]:
    """Times a plain step that each step took."""
    plain = [
        step.pace
        * world.costs.plain(
            len(step.requests), sum(request.sampled for request in step.requests)
        )
        for step in world.steps
    ]
    return [a / b for a, b in zip(record.seconds, plain, strict=True)]


def score(
    scenario: Scenario, num_seeds: int, max_slowdown: float = MAX_SLOWDOWN
) -> dict[str, float]:
    """Run a scenario with several seeds of each variant."""
    whole, first, slow = [], [], []
    for number in range(num_seeds * scenario.num_variants):
        world = scenario.world(number)
        schedule = AdaptiveScheduler(
            world.trees,
            MAX_TREES,
            can_sync=world.can_sync,
            max_slowdown=max_slowdown,
        )
        if world.is_timed:
            schedule.begin_with(world.forwards)
        record, best = run(world, schedule, seed=number), best_of(world)
        whole.append(best.share(world, record))
        first.append(best.share(world, record, FIRST_STEPS))
        slow += slowdowns(world, record)
    slow.sort()
    return {
        "whole": round(fmean(whole), 4),
        "first": round(fmean(first), 4),
        "worst": round(min(whole), 4),
        "p99": round(slow[int(0.99 * len(slow))], 4),
    }


def combined(scores: Mapping[str, float]) -> float:
    """One number of a scenario."""
    return (1 - FIRST_WEIGHT) * scores["whole"] + FIRST_WEIGHT * scores["first"]


Row = Sequence[str | float]


def table(header: Row, rows: Sequence[Row]) -> str:
    """A Markdown table; numbers have three digits."""
    rule = ["---", *["---:"] * (len(header) - 1)]
    lines = [[f"{x:.3f}" if isinstance(x, float) else x for x in row] for row in rows]
    return "\n".join(
        f"| {' | '.join(map(str, line))} |" for line in (header, rule, *lines)
    )


def shown(scores: Scores) -> str:
    """The scores of a schedule as a table."""
    keys = ("whole", "first", "worst", "p99")
    rows: list[Row] = [
        [name, *(of_name[key] for key in keys)] for name, of_name in scores.items()
    ]
    means = [fmean(of_name[key] for of_name in scores.values()) for key in keys]
    header = ["scenario", "whole", f"first {FIRST_STEPS}", "worst run", "p99 step"]
    return table(header, [*rows, ["mean", *means]])


def compared(first: Scores, second: Scores) -> str:
    """Two schedules side by side, of the scenarios that both have."""
    pairs = {
        name: (combined(scores), combined(second[name]))
        for name, scores in first.items()
        if name in second
    }
    of_first, of_second = zip(*pairs.values(), strict=True)
    pairs["mean"] = fmean(of_first), fmean(of_second)
    rows = [(name, a, b, b - a) for name, (a, b) in pairs.items()]
    return table(["scenario", "A", "B", "B - A"], rows)


def main() -> None:
    """Print, and perhaps write, the scores."""
    parser = argparse.ArgumentParser(prog="python -m tests.sim", description=__doc__)
    parser.add_argument("--only", default="", help="part of a scenario's name")
    parser.add_argument("--seeds", type=int, default=3, help="of each variant")
    parser.add_argument(
        "--max-slowdown", type=float, default=MAX_SLOWDOWN, help="of a step with trees"
    )
    parser.add_argument("--out", type=Path, help="JSON file to write")
    parser.add_argument("--compare", type=Path, nargs=2, metavar=("A", "B"))
    options = parser.parse_args()
    if options.compare:
        print(compared(*(json.loads(path.read_text()) for path in options.compare)))
        return
    chosen = [scenario for scenario in SCENARIOS if options.only in scenario.name]
    if not chosen:
        names = ", ".join(scenario.name for scenario in SCENARIOS)
        parser.error(f"no scenario is named {options.only!r}; there are {names}")
    scores = {
        each.name: score(each, options.seeds, options.max_slowdown) for each in chosen
    }
    print(shown(scores))
    if options.out:
        options.out.write_text(json.dumps(scores, indent=1) + "\n")


if __name__ == "__main__":
    main()
