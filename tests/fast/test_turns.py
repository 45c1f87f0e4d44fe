"""Engines that measure in turn, with engines that are functions."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Generator
from pathlib import Path

import pytest

from benchmarks.harness.plan import Engine, Failures, Plan, base_job, make_plan
from benchmarks.harness.turns import execute_in_turns
from vllm_treespec.tools.launch import READY, EngineError, Event, events_of
from vllm_treespec.tools.sides import Cell, CellResult, Job, plain_side

CELLS = [Cell(batch_size=size, temperature=0.0) for size in (1, 4)]


def plan_of(out: Path, names: list[str], rounds: int = 1) -> Plan:
    """A plan of sides that measure the same cells."""
    engines = [Engine(plain_side(name, True), CELLS, rounds) for name in names]
    return make_plan(base_job("t", ["a"], 4), engines, out, "")


class Engines:
    """Runs sides that report at once, and notes who measured what."""

    def __init__(self, failing: str = "") -> None:
        """Name a side that ends without a result."""
        self.failing = failing
        self.measured: list[tuple[str, str]] = []
        self.started: list[str] = []
        self.left: list[str] = []

    def __call__(self, job: Job, log: Path) -> Generator[Event]:
        """Be the process of a side."""
        name = job.side.name
        self.started.append(name)
        try:
            for cell in job.cells:
                yield {"event": READY}
                self.measured.append((name, cell.name))
                if name == self.failing:
                    raise EngineError("no luck")
                result = CellResult(
                    cell=cell, seconds=1, num_tokens=[4], tpot_ms=[], token_ids=[[0]]
                )
                yield {"event": "cell", "result": result.model_dump(mode="json")}
        finally:
            self.left.append(name)


def run(plan: Plan, engines: Engines, together: int = 9) -> Failures:
    """Run a plan's engines in turn."""
    return execute_in_turns(plan, lambda _: None, together=together, start=engines)


def test_engines_take_turns_at_each_cell(tmp_path: Path) -> None:
    """Red when an engine measures its next cell before others have had theirs."""
    plan, engines = plan_of(tmp_path, ["a", "b", "c"], rounds=2), Engines()
    assert run(plan, engines) == {}
    of_a_round = [(name, cell.name) for cell in CELLS for name in "abc"]
    assert engines.measured == of_a_round * 2
    assert sorted(engines.started) == ["a", "b", "c"], "one process for all rounds"
    assert not plan.todo()
    assert {stored.round for stored in plan.finished()} == {0, 1}


def test_few_engines_at_a_time(tmp_path: Path) -> None:
    """Red when more engines are in memory than were asked for."""
    engines = Engines()
    run(plan_of(tmp_path, ["a", "b", "c"]), engines, together=2)
    order = [name for name, _ in engines.measured]
    assert order == ["a", "b", "a", "b", "c", "c"]


def test_one_that_fails_does_not_stop_the_others(tmp_path: Path) -> None:
    """Red when the turn of an engine that ended is waited for."""
    plan, engines = plan_of(tmp_path, ["a", "b", "c"], rounds=2), Engines("b")
    assert run(plan, engines) == {"b": "no luck"}
    assert [job.side.name for _, job in plan.todo()] == ["b", "b"]


def test_what_is_finished_is_not_measured_again(tmp_path: Path) -> None:
    """Red when a run that was cut begins anew, or measures rounds of its own."""
    run(plan_of(tmp_path, ["a", "b"]), Engines())
    engines = Engines()
    run(plan_of(tmp_path, ["a", "b", "c"], rounds=2), engines)
    first = engines.measured[:2]
    assert first == [("c", cell.name) for cell in CELLS]
    assert len(engines.measured) == 2 + 6
    run(plan_of(tmp_path, ["a", "b", "c"], rounds=2), again := Engines())
    assert not again.started


def test_an_interruption_ends_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Red when engines go on after Ctrl-C."""
    plan, engines = plan_of(tmp_path, ["a", "b"], rounds=9), Engines()

    def interrupted(*args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Plan, "keep", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(plan, engines)
    assert sorted(engines.left) == ["a", "b"]


ASKS = """
import sys
from vllm_treespec.tools.launch import reporting
sys.stdin.readline()
with reporting() as send:
    for number in range(2):
        send("ready")
        send("cell", number=number)
"""


def test_a_process_waits_until_it_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Red when an engine measures while others do."""
    (tmp_path / "asks.py").write_text(ASKS)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    process = events_of("asks", CELLS[0], tmp_path / "log")
    assert [event["event"] for event in process] == [
        *("launched", *["ready", "cell"] * 2, "done")
    ]


def take_slowly(process: Generator[Event]) -> None:
    """Take all events, each a while after the one before."""
    for _ in process:
        time.sleep(0.5)


def test_a_process_that_is_killed_while_it_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Red when an engine that ran out of memory ends the others without a word."""
    (tmp_path / "asks.py").write_text(
        ASKS.replace(
            'send("ready")',
            'import os, signal; print(json.dumps({"event": "ready"}), file=out, '
            "flush=True); os.kill(os.getpid(), signal.SIGKILL)",
        ).replace("import sys", "import json, os, sys\nout = os.fdopen(os.dup(1), 'w')")
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    process = events_of("asks", CELLS[0], tmp_path / "log")
    with pytest.raises(EngineError, match=r"perhaps for memory \(log: "):
        take_slowly(process)


def test_a_process_ends_with_the_one_that_started_it(tmp_path: Path) -> None:
    """Red when engines go on after the command was killed."""
    (tmp_path / "asks.py").write_text(ASKS)
    done = subprocess.run(
        [sys.executable, "asks.py"],
        cwd=tmp_path,
        input="task\n",
        capture_output=True,
        text=True,
        check=False,
        env={"PYTHONPATH": str(Path.cwd())},
        timeout=60,
    )
    assert done.returncode != 0
    assert [json.loads(line)["event"] for line in done.stdout.splitlines()] == ["ready"]
    assert "has ended" in done.stderr
