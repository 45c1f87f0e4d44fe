"""The queries of the Grafana board and of the Prometheus rules, and their metrics."""

import json
import re
from pathlib import Path
from typing import Any

import yaml

MONITORING = Path(__file__).parents[1] / "deploy" / "monitoring"


def board() -> dict[str, Any]:
    """The Grafana board."""
    return json.loads((MONITORING / "board.json").read_text("utf-8"))


def board_queries() -> list[str]:
    """PromQL of every panel."""
    panels = board()["panels"]
    return [t["expr"] for panel in panels for t in panel.get("targets", [])]


def rules() -> list[dict[str, Any]]:
    """The rules of all groups."""
    groups = yaml.safe_load((MONITORING / "rules.yaml").read_text("utf-8"))["groups"]
    return [rule for group in groups for rule in group["rules"]]


def metric_names(text: str) -> set[str]:
    """vLLM's metrics and ours that a text names."""
    return {*re.findall(r"\bvllm:\w+", text)}
