"""The demo with engines that are functions."""

import io
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console

from vllm_treespec.tools import demo
from vllm_treespec.tools.launch import LAUNCHED, READY, EngineError, Event
from vllm_treespec.tools.prompts import SHIPPED_WORKLOADS, PromptError, load_workloads
from vllm_treespec.tools.sides import PLAIN, Cell, CellResult, Job

SUFFIX, HYBRID = demo.SUFFIX["method"], demo.HEAD["method"]
SPEEDS = {PLAIN: 10.0, SUFFIX: 10.2, HYBRID: 30.0}


class Engines:
    """Engines whose answers take a time, and the turns that they take."""

    def __init__(self) -> None:
        """All is well; tests change it."""
        self.turns: list[tuple[str, str]] = []
        self.closed: list[str] = []
        self.slower_each_time = 1.0
        self.on_cpu = 0.95
        self.failing = ""
        self.other_answer: tuple[str, bool | None] | None = None

    def __call__(self, job: Job, log: Path) -> Iterator[Event]:
        """Be the process of a side."""
        name = job.side.name
        log.write_text("why")
        try:
            yield {"event": LAUNCHED}
            if name == self.failing:
                raise EngineError(f"{name}: broken (log: {log})")
            yield {"event": "started", "seconds": 1.0}
            for text in ("def f", "(x):") if job.stream else ():
                yield {"event": READY}
                yield {
                    "event": "text",
                    "text": text,
                    "num_tokens": 1 if name == PLAIN else 4,
                    "seconds": 0.1,
                    "ended": text == "(x):",
                }
            for number, cell in enumerate(job.cells):
                yield {"event": READY}
                self.turns.append((name, cell.workload))
                yield {"event": "cell", "result": self.result(name, number, cell)}
            yield {"event": "done"}
        finally:
            self.closed.append(name)

    def result(self, name: str, number: int, cell: Cell) -> dict:
        """Answer a prompt, ever more slowly if asked to."""
        drafts = cell.params.get("extra_args", {}).get("treespec", {}).get("enabled")
        token = 9 if (name, drafts) == self.other_answer else 3
        seconds = self.slower_each_time**number / SPEEDS[name]
        result = CellResult(
            cell=cell,
            seconds=seconds,
            cpu_seconds=self.on_cpu * seconds,
            num_tokens=[1],
            tpot_ms=[],
            token_ids=[[token]],
        )
        return result.model_dump(mode="json")


@pytest.fixture
def engines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Engines:
    """Engines for a target that is ``tmp_path``."""
    made = Engines()
    monkeypatch.setattr(demo, "side_events", made)
    monkeypatch.setattr(demo.tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "80")
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    return made


def test_all_parts_are_shown(
    engines: Engines, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Red when a part is lost, 80 columns do not hold the table, a slow method is
    advised, or a key that only serves the measurement is."""
    demo.main(str(tmp_path))
    text = capsys.readouterr().out
    assert f"{PLAIN}: 10 tokens/s, 0.2 s" in text
    assert f"{SUFFIX}: 40 tokens/s, 0.2 s" in text
    assert text.count("def f(x):") == 2
    assert text.count("3.00 (3.00-3.00)") == 2 * len(load_workloads(SHIPPED_WORKLOADS))
    assert "busy" not in text
    assert f"{SUFFIX}: 9 of 9 greedy" in text
    assert "chat: use hybrid, 3.00x at T = 0, 3.00x at T = 1" in text
    assert str(tmp_path) in text.splitlines()[-1]
    assert not list(tmp_path.glob("treespec-demo-*"))


def test_a_long_answer_shows_its_end_while_it_grows() -> None:
    """Red when the live view is cut where an answer grows, or the final one is cut."""
    text = "\n".join(f"line {i}" for i in range(30)) + " wide" * 20
    piece = {"text": text, "num_tokens": 9, "seconds": 1.0, "ended": False}
    screen = Console(width=80, height=24, record=True, file=io.StringIO())
    screen.print(demo.side_by_side({PLAIN: [piece], SUFFIX: [piece]}, screen))
    live = screen.export_text()
    assert len(live.splitlines()) == screen.height - 1
    assert "line 29" in live
    assert "line 2 " not in live
    screen.print(demo.side_by_side({PLAIN: [piece], SUFFIX: [piece]}))
    assert "line 2 " in screen.export_text()


def test_engines_take_turns_in_rotating_order(engines: Engines, tmp_path: Path) -> None:
    """Red when a side answers a prompt long before the others, or always first."""
    demo.main(str(tmp_path))
    count = len(SPEEDS)
    last = engines.turns[-4 * count :]
    pairs = [last[i : i + count] for i in range(0, len(last), count)]
    for pair in pairs:
        assert {name for name, _ in pair} == set(SPEEDS)
        assert len({prompt for _, prompt in pair}) == 1
    assert len({pair[0][0] for pair in pairs}) == count


def test_a_machine_whose_speed_changes_is_named(
    engines: Engines, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Red when figures of a busy machine are shown as good ones, or a change of speed
    that all sides meet changes a ratio."""
    engines.slower_each_time = 1.05
    demo.main(str(tmp_path))
    text = " ".join(capsys.readouterr().out.split())
    assert "The machine was busy: plain vLLM's speed for one prompt differs 2." in text
    assert "3.00 (3.00-3.00)" in text


def test_a_machine_that_is_slow_all_the_time_is_named(
    engines: Engines, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Red when other programs that slow all answers alike go unnoticed."""
    engines.on_cpu = 0.5
    demo.main(str(tmp_path))
    text = " ".join(capsys.readouterr().out.split())
    assert "busy: the engines had a processor for only 50% of their time. The" in text
    assert "chat: use" not in text, "figures that mean little"


@pytest.mark.parametrize(
    ("drafts", "counts"), [(None, ("0 of 9", "9 of 9")), (True, ("9 of 9", "0 of 9"))]
)
def test_answers_that_differ_are_counted(
    engines: Engines,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    drafts: bool | None,
    counts: tuple[str, str],
) -> None:
    """Red when greedy answers are not compared with plain vLLM's, or sampled ones not
    with those of the same engine without drafts."""
    engines.other_answer = SUFFIX, drafts
    demo.main(str(tmp_path))
    words = " ".join(capsys.readouterr().out.split())
    assert (
        "{}: {} greedy, beside plain vLLM; {} sampled".format(SUFFIX, *counts) in words
    )
    assert f"{HYBRID}: 9 of 9 greedy, beside plain vLLM; 9 of 9 sampled" in words


def test_an_engine_that_fails_ends_the_demo(engines: Engines, tmp_path: Path) -> None:
    """Red when other engines go on, or the log is gone."""
    engines.failing = SUFFIX
    with pytest.raises(
        SystemExit, match=r"^treespec demo: suffix_tree: broken \(log: "
    ):
        demo.main(str(tmp_path))
    assert set(engines.closed) == set(SPEEDS)
    [log] = tmp_path.glob(f"treespec-demo-*/{SUFFIX}.log")
    assert log.read_text() == "why"


@pytest.mark.parametrize(
    ("target", "prompts", "message"),
    [
        ("none", None, r"--target: there is no folder .*/none; name"),
        ("", Path("none.jsonl"), "there is no file none.jsonl"),
    ],
)
def test_what_is_missing_starts_no_engine(
    engines: Engines, tmp_path: Path, target: str, prompts: Path | None, message: str
) -> None:
    """Red when engines have to say that there is no such folder or file."""
    with pytest.raises(SystemExit, match=f"^treespec demo: {message}"):
        demo.main(str(tmp_path / target), prompts=prompts)
    assert engines.closed == []


def test_shipped_workloads_suffice_for_the_demo() -> None:
    """Red when a kind of work loses its prompts, or an edited function has fewer than
    12 or more than 25 lines."""
    found = load_workloads(SHIPPED_WORKLOADS)
    assert list(found) == ["chat", "code", "editing"]
    assert all(len(prompts) == demo.NUM_PROMPTS for prompts in found.values())
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


def test_speed_is_measured_in_a_dtype_that_the_processor_computes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Red when the demo shows the speed of emulated arithmetic."""
    monkeypatch.setattr(demo.torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(demo, "slow_arithmetic", lambda dtype: "slow")
    assert demo.fast_dtype() == "float32"
    monkeypatch.setattr(demo, "slow_arithmetic", lambda dtype: None)
    assert demo.fast_dtype() == "bfloat16"


def test_equal_answers_are_of_trees_and_speeds_of_the_default_schedule(
    engines: Engines, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Red when plain steps are compared with plain steps, or when the advised command
    serves another schedule than the measured one."""
    schedules = []

    def start(job: Job, log: Path) -> Iterator[Event]:
        spec = job.side.engine.get("speculative_config", {})
        schedules.append((job.dtype, spec.get("schedule")))
        return engines(job, log)

    monkeypatch.setattr(demo, "side_events", start)
    monkeypatch.setattr(demo, "fast_dtype", lambda: "bfloat16")
    demo.main(str(tmp_path))
    assert schedules == [
        *[("float32", name) for name in (None, "fixed", "fixed")],
        *[("bfloat16", name) for name in (None, "measured", "measured")],
    ]
