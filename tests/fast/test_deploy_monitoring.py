"""The Grafana board and the Prometheus rules: metrics that exist, rules that fire."""

import http.server
import json
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import pytest
import vllm.v1.metrics.loggers
import vllm.v1.spec_decode.metrics
import yaml

from deploy.monitoring.picture import picture
from tests.fast.deployment import SOURCES, manifests, run
from tests.monitoring import MONITORING, board, board_queries, metric_names, rules
from vllm_treespec.metrics import COUNTERS, PREFIX

# What Prometheus adds to names of counters and histograms.
SUFFIXES = ("", "_total", "_bucket", "_sum", "_count")


def names_of_vllm() -> set[str]:
    """Metrics that the installed vLLM names in the modules that export them."""
    modules = (vllm.v1.metrics.loggers, vllm.v1.spec_decode.metrics)
    texts = [Path(str(module.__file__)).read_text("utf-8") for module in modules]
    return {name for text in texts for name in re.findall(r'"(vllm:\w+)"', text)}


def known_names() -> set[str]:
    bases = names_of_vllm() | {PREFIX + name for name in COUNTERS}
    return {base + suffix for base in bases for suffix in SUFFIXES}


def test_every_metric_of_the_board_exists() -> None:
    """Red when a counter is renamed here or in vLLM."""
    variables = [variable["query"] for variable in board()["templating"]["list"]]
    used = metric_names(json.dumps([board_queries(), variables]))
    assert used <= known_names()
    ours = {name for name in used if name.startswith(PREFIX)}
    of_one_method = ("num_beam_", "num_leftover_", "num_source_")
    expected = {name for name in COUNTERS if not name.startswith(of_one_method)}
    assert ours == {f"{PREFIX}{name}_total" for name in expected}


def test_every_metric_of_the_rules_exists() -> None:
    recorded = {rule["record"] for rule in rules() if "record" in rule}
    for rule in rules():
        used = metric_names(rule["expr"])
        assert used <= known_names(), rule
        assert {*re.findall(r"\btreespec:\w+", rule["expr"])} <= recorded, rule


@pytest.mark.parametrize("source", SOURCES)
def test_every_metric_of_an_autoscaler_exists(source: str) -> None:
    for document in manifests(source):
        if document["kind"] == "ScaledObject":
            used = metric_names(json.dumps(document["spec"]["triggers"]))
            assert used
            assert used <= known_names()


def test_the_rules_fire_when_they_should() -> None:
    """The cases stand in rules_test.yaml."""
    assert "SUCCESS" in run("promtool", "check", "rules", MONITORING / "rules.yaml")
    run("promtool", "test", "rules", MONITORING / "rules_test.yaml")


def test_every_alert_has_a_case() -> None:
    cases = yaml.safe_load((MONITORING / "rules_test.yaml").read_text("utf-8"))["tests"]
    fired = {
        alert["alertname"]
        for case in cases
        for alert in case["alert_rule_test"]
        if alert["exp_alerts"]
    }
    assert fired == {rule["alert"] for rule in rules() if "alert" in rule}


def test_prometheus_can_read_the_queries_of_the_board(tmp_path: Path) -> None:
    """Red when a query is no PromQL."""
    variables = {"$__rate_interval": "5m", "$model_name": ".*"}
    queries = board_queries()
    for name, value in variables.items():
        queries = [query.replace(name, value) for query in queries]
    made = [{"record": f"panel:{n}", "expr": q} for n, q in enumerate(queries)]
    file = tmp_path / "board.yaml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "board", "rules": made}]}))
    run("promtool", "check", "rules", file)


def test_panels_do_not_overlap() -> None:
    """Red when a panel is added on top of another, or with its number."""
    panels = board()["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        at = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(at["x"], at["x"] + at["w"])
            for y in range(at["y"], at["y"] + at["h"])
        }
        assert not taken & cells, panel["title"]
        taken |= cells
        assert at["x"] + at["w"] <= 24


class Answering(http.server.BaseHTTPRequestHandler):
    """Answers each query of a range with two lines of two points."""

    queries: ClassVar[list[str]] = []

    def do_GET(self) -> None:
        """Answer as Prometheus does."""
        self.queries.append(self.path)
        values = [[1.0e9, "1.5"], [2.0e9, "2.5"]]
        lines = [{"metric": {"stage": n}, "values": values} for n in ("draft", "score")]
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps({"data": {"result": lines}}).encode())

    def log_message(self, *_: object) -> None:
        """Print nothing."""


@pytest.fixture
def prometheus() -> Iterator[str]:
    """A server that answers every query."""
    with http.server.HTTPServer(("127.0.0.1", 0), Answering) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_the_picture_asks_for_every_panel(prometheus: str, tmp_path: Path) -> None:
    """Red when a variable of the board is left in a query, or a panel is left out."""
    Answering.queries.clear()
    picture(prometheus, minutes=1.0, rate_seconds=10, out=tmp_path / "board.png")
    assert len(Answering.queries) == len(board_queries())
    assert not any("%24" in query for query in Answering.queries), "$ in a query"
    assert (tmp_path / "board.png").stat().st_size > 20_000
