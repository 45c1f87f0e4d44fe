"""Curves and tables of trained heads, from what ``treespec train`` wrote."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness import report
from vllm_treespec.heads.published_dflash import is_dflash

Training = dict[str, Any]
# What ``treespec train evaluate --json`` wrote beside training.json.
EVALUATION = "evaluation.json"
SPLIT = "the evaluation split"
LYANNA = "Ablation of Lyanna heads"


def read_trainings(folder: Path, by_step: bool = False) -> list[Training]:
    """Read what was noted of each head below a folder.

    Args:
        folder: with a folder for each head.
        by_step: whether to keep the evaluations on the way.

    Raises:
        ValueError: when there is none.

    """
    found = [
        {
            **training_of(file.parent, str(file.parent.relative_to(folder)), record),
            **({"evaluations": record.get("evaluations", [])} if by_step else {}),
        }
        for file in sorted(folder.glob("**/training.json"))
        # a draft model's has none
        if "training" in (record := json.loads(file.read_text(encoding="utf-8")))
    ]
    if not found:
        raise ValueError(f"--trainings: {folder} holds no training.json of a head")
    return found


def training_of(head: Path, name: str, record: dict[str, Any]) -> Training:
    """Shorten a record to what tables and curves show."""
    options, result = record["training"], record["result"]
    # that of an EAGLE or a one-pass head is in a published form, which has no method
    config = json.loads((head / "config.json").read_text(encoding="utf-8"))
    published = "dflash" if is_dflash(config) else "eagle"
    levels = range(1, 1 + sum(key.startswith("accuracy_") for key in result))
    quality = {
        k: [result[f"{k}_{i}"] for i in levels] for k in ("accuracy", "acceptance")
    }
    text, evaluation = SPLIT, head / EVALUATION
    if evaluation.is_file():
        found = json.loads(evaluation.read_text(encoding="utf-8"))
        text = ", ".join(found["text"])
        accuracies = [ranks[0] for ranks in found["accuracies"]]
        quality = {"accuracy": accuracies, "acceptance": found["acceptance"]}
    return {
        "name": name,
        "kind": config.get("method", published),
        "layers": len(record["teacher"].get("layers", ["final"])),
        "share": options.get("text_share", 1.0),
        "training": {**options, **record.get("head", {})},
        # of which the figures by level are
        "text": text,
        **{key: record[key] for key in ("conversations", "answer_positions")},
        **{key: result[key] for key in ("steps", "positions", "size_mb")},
        **quality,
    }


def chain_length(training: Training, name: str = "accuracy") -> float:
    """Tokens a step of a chain as deep as the levels, by the shares of each level."""
    return 1 + sum(itertools.accumulate(training[name], lambda a, b: a * b))


def scaling(trainings: Sequence[Training]) -> list[list[Training]]:
    """Heads that differ in their share of the text alone, by ascending share."""
    groups: dict[str, list[Training]] = {}
    for training in sorted(trainings, key=lambda training: training["share"]):
        options = {**training["training"], "text_share": None}
        same = [training["kind"], training["layers"], training["text"], options]
        groups.setdefault(json.dumps(same, sort_keys=True), []).append(training)
    return [g for g in groups.values() if g[0]["share"] < g[-1]["share"]]


def ablation(trainings: Sequence[Training], kind: str) -> list[Training]:
    """Heads of one kind, trained on all of the text as long as another, best last."""
    found = [t for t in trainings if t["kind"] == kind and t["share"] == 1]
    count = Counter((t["text"], t["steps"]) for t in found)
    alike = [t for t in found if count[t["text"], t["steps"]] > 1]
    return sorted(alike, key=chain_length)


COLUMNS: report.Columns = {
    "head": "{name}",
    "layers": "{layers}",
    "unrolled": "{training[steps]}",
    "feature loss": "{training[feature_weight]:g}",
    "share of text": "{share:.0%}",
    "conversations": "{conversations}",
    "steps": "{steps}",
    "positions seen, M": lambda t: f"{t['positions'] / 1e6:.2f}",
    "MB": "{size_mb:.1f}",
    "chain, T = 0": lambda t: f"{chain_length(t):.2f}",
    "chain, T = 1": lambda t: f"{chain_length(t, 'acceptance'):.2f}",
}
LEVELS = {"first guess": "accuracy", "accepted": "acceptance"}
LYANNA_COLUMNS: report.Columns = {
    "first token": "{training[first_token]}",
    "context": "{training[context]}",
    "token info, rank": "{training[token_info_rank]}",
    "of tokens": "{training[token_info]}",
}
NOTES = (
    "First guess: how often it is the target's likeliest token. Accepted: the chance "
    "that one draft token is, at T = 1. Chain: tokens a step of a chain as deep as "
    "the levels, by these shares. Before each level stand the text's own tokens."
)


def sections(trainings: Sequence[Training]) -> list[str]:
    """Write the scaling curve, the ablation, and all heads by level."""
    named = {
        "Scaling: share of the text": list(itertools.chain(*scaling(trainings))),
        "Ablation of EAGLE heads": ablation(trainings, "eagle"),
        LYANNA: ablation(trainings, "lyanna"),
    }
    for text in dict.fromkeys(training["text"] for training in trainings):
        named[f"Heads on {text}"] = [t for t in trainings if t["text"] == text]
    tables: dict[str, tuple[Sequence[Training], report.Columns]] = {}
    for heading, rows in named.items():
        depth = max((len(training["accuracy"]) for training in rows), default=0)
        levels = {
            f"{title} t+{i + 1}": f"{{{name}[{i}]:.1%}}"
            for title, name in LEVELS.items()
            for i in range(depth)
        }
        more = LYANNA_COLUMNS if heading == LYANNA else {}
        tables[heading] = rows, {**COLUMNS, **more, **levels}
    parts = report.sections(tables)
    return [*parts, NOTES] if parts else []


def curve_points(trainings: Sequence[Training]) -> list[dict[str, Any]]:
    """Points of the scaling plot."""
    return [
        {
            "share of the text": training["share"],
            "tokens a step of a chain": chain_length(training, name),
            "by": title,
            "head": curve[-1]["name"],
        }
        for curve in scaling(trainings)
        for training in curve
        for title, name in LEVELS.items()
    ]
