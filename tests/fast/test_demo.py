"""The demo's table and sentences. No engine."""

import io
import json
import tempfile
from pathlib import Path

import pytest
from rich.console import Console

from vllm_treespec.tools import demo
from vllm_treespec.tools.launch import EngineError, OnEvent
from vllm_treespec.tools.prompts import SHIPPED_WORKLOADS, PromptError, load_workloads
from vllm_treespec.tools.sides import (
    Cell,
    CellResult,
    Job,
    Side,
    SideResult,
    plain_side,
    tree_side,
)

PLAIN = plain_side("plain-eager", eager=True)
SUFFIX = tree_side(demo.SUFFIX, eager=True)


def measured(seconds: dict[str, float], temperatures: list[float]) -> SideResult:
    """Make a side's result, the time of each workload given."""
    cells = [
        CellResult(
            cell=Cell(batch_size=1, temperature=temperature, workload=name),
            seconds=time,
            num_tokens=[3],
            tpot_ms=[1.0],
            token_ids=[[1, 2, 3]],
        )
        for temperature in temperatures
        for name, time in seconds.items()
    ]
    return SideResult(start_seconds=1.0, cells=cells)


def results() -> tuple[list[Side], dict[str, SideResult]]:
    """Suffix trees that help editing and slow chat down."""
    temperatures = list(demo.TEMPERATURES)
    return [PLAIN, SUFFIX], {
        PLAIN.name: measured({"chat": 3.0, "editing": 3.0}, temperatures),
        SUFFIX.name: measured({"chat": 4.0, "editing": 1.0}, temperatures),
    }


def test_shipped_workloads_suffice_for_the_demo() -> None:
    """Red when a workload of the demo loses its prompts, or an edited function has
    fewer than 12 or more than 25 lines."""
    found = load_workloads(SHIPPED_WORKLOADS)
    assert tuple(found) == demo.WORKLOADS
    assert all(len(prompts) >= demo.NUM_PROMPTS for prompts in found.values())
    for prompt in found["editing"]:
        function = prompt.split("```")[1].removeprefix("python\n")
        compile(function, "prompt", "exec")
        assert 12 <= len(function.splitlines()) <= 25


def test_workload_file_is_refused_by_line(tmp_path: Path) -> None:
    """Red when a row without a workload passes without a message."""
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"workload": "a", "prompt": "b"}\n{"prompt": "c"}\n')
    with pytest.raises(PromptError, match="line 2 lacks text under 'workload'"):
        load_workloads(path)


def test_advice_names_the_best_method_and_its_spec_config() -> None:
    """Red when a slow method is advised, a number is another cell's, or a key that
    only serves the measurement is advised."""
    sides, speed = results()
    chat, editing = demo.advice(demo.rows_of(sides, speed), sides)
    assert chat.startswith("chat: use plain vLLM")
    assert "suffix_tree, runs at 0.8× at T = 0, 0.8× at T = 1" in chat
    start, spec = editing.split("; ")
    assert start == (
        "editing: use suffix_tree, 3.0× at T = 0, 3.0× at T = 1 of the fastest plain "
        "vLLM"
    )
    spec = json.loads(spec)
    assert spec["method"] == "suffix_tree"
    assert not {"schedule", "max_cached_tokens"} & spec.keys()


def test_table_has_a_line_for_every_workload_and_side() -> None:
    """Red when a workload or side is lost, 80 columns do not hold the table, or a
    failed side ends the demo."""
    sides, speed = results()
    table = demo.result_table(demo.rows_of(sides, speed), "float32")
    assert table.row_count == 4
    text = io.StringIO()
    Console(file=text, width=80).print(table)
    assert text.getvalue().count("3.00×") == 2
    assert text.getvalue().count(SUFFIX.name) == 2
    del speed[SUFFIX.name]
    rows = demo.rows_of(sides, speed)
    assert demo.result_table(rows, "float32").row_count == 2
    assert demo.advice(rows, sides) == []


def test_speed_is_measured_in_a_dtype_that_the_processor_computes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Red when the demo shows the speed of emulated arithmetic."""
    monkeypatch.setattr(demo.torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(demo, "slow_arithmetic", lambda dtype: "slow")
    assert demo.fast_dtype() == "float32"
    monkeypatch.setattr(demo, "slow_arithmetic", lambda dtype: None)
    assert demo.fast_dtype() == "bfloat16"


def test_a_target_that_is_missing_starts_no_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Red when seven engines have to say that there is no such folder."""
    monkeypatch.setattr(demo, "run_side", None)
    with pytest.raises(SystemExit, match=r"--target: there is no folder .*/none; name"):
        demo.main(str(tmp_path / "none"))


def test_without_plain_the_demo_ends_and_its_logs_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Red when engines start that cannot be compared, or a log is gone."""
    logs: list[Path] = []

    def fails(job: Job, log: Path, on_event: OnEvent) -> SideResult:
        log.write_text("why")
        logs.append(log)
        raise EngineError(f"{job.side.name}: broken (log: {log})")

    monkeypatch.setattr(demo, "run_side", fails)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(SystemExit, match="plain vLLM failed"):
        demo.main(str(tmp_path))
    assert [log.read_text() for log in logs] == ["why", "why"]


def test_equality_is_counted_over_all_workloads() -> None:
    """Red when an answer that differs counts as equal."""
    exact = results()[1]
    assert demo.identical(SUFFIX.name, PLAIN.name, exact) == "4 of 4"
    exact[SUFFIX.name].cells[1].token_ids = [[1, 2, 4]]
    assert demo.identical(SUFFIX.name, PLAIN.name, exact) == "3 of 4"
    [line] = demo.equality(PLAIN.name, exact)
    assert f"{SUFFIX.name} 3 of 4." in line
    del exact[PLAIN.name]
    assert demo.equality(PLAIN.name, exact) == []


def test_bar_reaches_its_end_and_the_answer_is_shown() -> None:
    """Red when an event is not counted or a line of the streamed answer is lost."""
    workloads = {"chat": ["Hello?"], "editing": ["Rename."]}
    job = demo.job(SUFFIX, "target", workloads, [0.0, 1.0], 4, "bfloat16")
    job.stream = "Rename."
    text = io.StringIO()
    shown = demo.Demo(Console(file=text, width=120), [job])
    watch = demo.Watch(shown.bar, shown.task, job, "suffix")
    watch({"event": "started", "seconds": 1.0})
    [task] = shown.bar.tasks
    assert task.description == "suffix: chat, T = 0"
    for _ in job.cells:
        watch({"event": "cell", "result": {}})
    assert task.completed == task.total
    for piece in ("def f", "(x):\n  ret", "urn x"):
        watch({"event": "text", "text": piece})
    watch({"event": "done"})
    assert "answers: Rename.\ndef f(x):\n  return x …\n" in text.getvalue()
