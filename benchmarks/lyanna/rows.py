"""Numbers of the tables and figures from finished cells and trained heads."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.eagle.trainings import Training
from benchmarks.harness.plan import StoredCell
from benchmarks.harness.rows import Entry, by_key, rows_of
from benchmarks.lyanna import parts
from benchmarks.lyanna.heads import variant_of
from vllm_treespec.batch.stats import DRAFT_FORWARD
from vllm_treespec.tools.sides import PLAIN, Acceptance, CellResult

Row = dict[str, Any]
# A value of each round, by side and batch size or depth.
Values = Mapping[tuple[str, int], Mapping[int, float]]
AGAINST_EAGLE = {
    "Lyanna / EAGLE, hot tokens": (parts.LYANNA_HOT, parts.EAGLE_HOT),
    "Lyanna / EAGLE, all tokens": (parts.LYANNA_FULL, parts.EAGLE_FULL),
}
RATIOS = {
    **AGAINST_EAGLE,
    "Lyanna / EAGLE, measured schedules": (parts.LYANNA_DEFAULT, parts.EAGLE_DEFAULT),
    "Lyanna / plain": (parts.LYANNA_HOT, PLAIN),
    "Lyanna, replace / plain": (parts.REPLACE, PLAIN),
    "EAGLE / plain": (parts.EAGLE_HOT, PLAIN),
    "Lyanna, measured schedule / plain": (parts.LYANNA_DEFAULT, PLAIN),
    "EAGLE, measured schedule / plain": (parts.EAGLE_DEFAULT, PLAIN),
}
# The whole of drafting; the head's forwards, and which of them are for what.
STAGES = ("draft", DRAFT_FORWARD, "pairs", "levels")
# Levels whose accuracies table 2 averages.
ACCURACY = "accuracy"
CURVES = {
    "KL": ["eval_kl"],
    ACCURACY: [f"eval_accuracy_{level}" for level in (1, 2, 3)],
}


def evidence_of(
    entries: Sequence[Entry], finished: Sequence[StoredCell]
) -> dict[str, list[Row]]:
    """Rows of every part that engines measure, and ratios."""
    held = by_key(finished)
    done: dict[str, list[Entry]] = {part: [] for part in parts.PARTS}
    for entry in entries:
        if entry.key in held:
            done[entry.part].append(entry)
    speed, drafting = done[parts.SPEED], done[parts.DRAFTING]
    speeds = {
        (PLAIN if e.side.family == PLAIN else e.kind, e.cell.batch_size): {
            s.round: sum(s.result.num_tokens) / s.result.seconds for s in held[e.key]
        }
        for e in speed
        if e.cell.tree in (None, parts.TREE)
    }
    times = {
        stage: {
            (e.kind, e.cell.tree["depth"]): {
                s.round: stage_ms(s.result, stage) for s in held[e.key]
            }
            for e in drafting
            if e.cell.tree
        }
        for stage in STAGES
    }
    ratios = [("tokens/s", ratios_of(speeds, RATIOS))]
    ratios += [(s, ratios_of(times[s], AGAINST_EAGLE)) for s in STAGES[:2]]
    rows = zip(speed, rows_of(speed, finished), strict=True)
    first = {e.kind: held[e.key][0].result for e in done[parts.TABLE1]}
    return {
        "speed": [
            row.model_copy(update=median_details(held[entry.key])).model_dump()
            for entry, row in rows
        ],
        "ratios": [{"of": of, **row} for of, found in ratios for row in found],
        "drafting": [
            {"side": side, "depth": depth}
            | {s: statistics.median(times[s][side, depth].values()) for s in STAGES}
            for side, depth in times["draft"]
        ],
        "output": [
            {"side": e.kind, **median_details(held[e.key])} for e in done[parts.OUTPUT]
        ],
        "table1": [
            {"side": side, **conditional(result.acceptance)}
            for side, result in first.items()
            if result.acceptance
        ],
    }


def stage_ms(result: CellResult, stage: str) -> float:
    """Milliseconds of a stage a step."""
    return 1000 * result.stage_seconds.get(stage, 0.0) / (result.steps or 1)


def median_details(cells: Sequence[StoredCell]) -> Row:
    """Details of a measurement, medians of the rounds."""
    details = [stored.result.details for stored in cells]
    return {name: statistics.median(d[name] for d in details) for name in details[0]}


def ratios_of(values: Values, ratios: Mapping[str, tuple[str, str]]) -> list[Row]:
    """Ratios of values of the same round; ``at`` is the batch size or the depth."""
    rows = []
    for at in dict.fromkeys(at for _, at in values):
        for name, (mine, other) in ratios.items():
            both, base = values.get((mine, at), {}), values.get((other, at), {})
            found = [both[round_] / base[round_] for round_ in both if round_ in base]
            if found:
                spread = {"min": min(found), "max": max(found)}
                median = statistics.median(found)
                rows.append({"ratio": name, "at": at, "median": median, **spread})
    return rows


def conditional(acceptance: Acceptance) -> Row:
    """How often a depth was accepted where the one before it was: table 1."""
    steps = []
    reached = acceptance.trees
    for accepted in acceptance.at_least:
        share = accepted / reached
        error = (share * (1 - share) / reached) ** 0.5
        steps.append({"share": share, "error": error})
        reached = accepted
    return {"trees": acceptance.trees, "length": acceptance.length, "steps": steps}


def curves_of(trainings: Sequence[Training]) -> list[Row]:
    """Points of table 2 and figure 5, all of the evaluation split."""
    return [
        {
            "head": f"{variant_of(training['training'])} ({training['name']})",
            "step": entry["step"],
            "metric": metric,
            "value": statistics.fmean(entry[name] for name in names),
        }
        for training in trainings
        if training["kind"] == "lyanna"
        for entry in training["evaluations"]
        for metric, names in CURVES.items()
        if all(name in entry for name in names)
    ]
