"""Served load: server and client stood in for by a small program. No engine."""

import json
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from benchmarks import served
from benchmarks.__main__ import app
from tests.fast.stored_cells import without_pictures
from vllm_treespec.tools.launch import EngineError
from vllm_treespec.tools.sides import Cell, Job, plain_side, results_of

# `serve` answers /health until it is ended; `bench` writes what the client would.
STAND_IN = """#!{python}
import http.server, json, pathlib, sys
arguments = dict(zip(sys.argv[2:-1], sys.argv[3:]))
if sys.argv[1] == "serve":
    class Healthy(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.end_headers()
    if "broken" in sys.argv:
        raise ValueError("no such model")
    port = int(arguments["--port"])
    http.server.HTTPServer(("127.0.0.1", port), Healthy).serve_forever()
asked = len(pathlib.Path(arguments["--dataset-path"]).read_text().splitlines())
result = {{"completed": asked - {lost}, "duration": 2.0, "ttfts": [1.0]}}
result["output_throughput"] = 10.0 * int(arguments["--max-concurrency"])
result["median_itl_ms"] = float(arguments["--request-rate"])
result["p99_itl_ms"] = 8.0
folder = pathlib.Path(arguments["--result-dir"])
(folder / arguments["--result-filename"]).write_text(json.dumps(result))
"""


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ask often whether the server is there."""
    monkeypatch.setattr(served, "POLL_S", 0.05)


def stand_in(folder: Path, lost: int = 0) -> str:
    """Write the program; returns its path."""
    program = folder / "vllm"
    program.write_text(STAND_IN.format(python=sys.executable, lost=lost))
    program.chmod(0o755)
    return str(program)


def job(**more: object) -> Job:
    """Make a job of two loads on a plain server."""
    cells = [Cell(batch_size=n, temperature=0.0, workload="chat") for n in (1, 4)]
    return Job.model_validate(
        {
            "side": plain_side("plain-eager", eager=True),
            "target": "target",
            "prompts": [],
            "workloads": {"chat": ["a", "b"]},
            "cells": cells,
            "max_tokens": 4,
            **more,
        }
    )


def test_each_load_is_measured_on_one_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Red when a load is lost, or the client's lists fill the results."""
    monkeypatch.setattr(served, "VLLM", stand_in(tmp_path))
    events = served.serve_side([], tmp_path, job(), tmp_path / "log")
    details = [result.details for result in results_of(events)]
    assert [found["output_throughput"] for found in details] == [10.0, 40.0]
    assert "ttfts" not in details[0]


def test_lost_requests_and_broken_servers_are_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Red when a table is made of fewer answers than were asked for."""
    monkeypatch.setattr(served, "VLLM", stand_in(tmp_path, lost=1))
    with pytest.raises(EngineError, match="1 of 2 requests"):
        list(served.serve_side([], tmp_path, job(), tmp_path / "log"))
    with pytest.raises(EngineError, match="ValueError: no such model"):
        list(served.serve_side(["broken"], tmp_path, job(), tmp_path / "log"))


def test_the_command_writes_the_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Red when ratios are not over plain under the same load."""
    monkeypatch.setattr(served, "VLLM", stand_in(tmp_path))
    without_pictures(monkeypatch)
    target = tmp_path / "target"
    target.mkdir()
    command = ["served", "--target", str(target), "--draft", "none", "--clients", "1,4"]
    command += ["--rates", "0.5"]
    done = CliRunner().invoke(app, [*command, "--out", str(tmp_path / "out")])
    assert done.exit_code == 0, done.output
    text = (tmp_path / "out" / "results.md").read_text()
    assert "## prompts, 4 clients, temperature 0" in text
    assert "| suffix_tree-32x28-adaptive-compiled | 40.0 | 1.00× | – | 1.00× |" in text
    _, rated = text.split("## prompts, 0.5 requests/s, temperature 0")
    assert "| suffix_tree-32x28-adaptive-compiled | 160.0 | 1.00× |" in rated
    content = json.loads((tmp_path / "out" / "results.json").read_text())
    assert content["provenance"]["command"].startswith("python -m benchmarks served")
    assert {(row["rate"], row["itl_ms"]) for row in content["rows"]} == {
        (0.0, None),
        (0.5, 0.5),
    }
