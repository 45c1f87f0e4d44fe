"""What the demo says about measured speeds."""

import json
import shlex
import sys
from pathlib import Path

import pytest

from vllm_treespec.tools import demo_report
from vllm_treespec.tools.demo_report import (
    Pair,
    advice,
    best_overall,
    busy,
    serve_command,
)
from vllm_treespec.tools.sides import PLAIN, Cell, CellResult, Side

SUFFIX, HYBRID = "suffix_tree", "hybrid"
CHAT = Cell(batch_size=1, temperature=0.0, label="chat")
HOT_CHAT = CHAT.model_copy(update={"temperature": 1.0})


def side(name: str) -> Side:
    """A side of ours with keys that only serve the measurement."""
    spec = {"method": name, "model": "a head", "max_cached_tokens": 0}
    engine = {"speculative_config": spec, "gpu_memory_utilization": 0.25}
    return Side(name=name, family=name, engine=engine)


def pair(cell: Cell, hybrid: float, on_cpu: float = 1.0, plain: float = 10.0) -> Pair:
    """Speeds of which suffix_tree's is 1.02 times plain's."""
    return Pair(
        cell, {PLAIN: plain, SUFFIX: 1.02 * plain, HYBRID: hybrid * plain}, on_cpu
    )


def test_advice_names_the_gain_at_each_temperature() -> None:
    """Red when a mean hides that a method gains at one temperature only."""
    pairs = [pair(CHAT, 3.06), pair(HOT_CHAT, 1.07)]
    [line] = advice(pairs, shipped=True)
    assert line == "chat: use hybrid, 3.06x at T = 0, 1.07x at T = 1"


def test_small_target_says_why_chat_gains_nothing() -> None:
    """Red when trees that gain nothing are advised, or nothing says why."""
    pairs = [pair(CHAT, 0.9), pair(HOT_CHAT, 0.9)]
    lines = advice(pairs, shipped=True)
    figures = "1.02x at T = 0, 1.02x at T = 1"
    assert lines[0] == f"chat: use plain vLLM; {SUFFIX}, the best, {figures}"
    assert lines[1] == demo_report.SMALL_TARGET
    assert demo_report.SMALL_TARGET not in advice(pairs, shipped=False)


def test_best_method_is_that_of_all_kinds_of_work() -> None:
    """Red when the command serves what one kind of work gains most from."""
    code = CHAT.model_copy(update={"label": "code"})
    assert best_overall([pair(CHAT, 0.9), pair(code, 3.0)]) == HYBRID
    assert best_overall([pair(CHAT, 0.5), pair(code, 1.4)]) == SUFFIX


@pytest.mark.parametrize("openmp", [None, Path("/an env/lib/libiomp5.so")])
def test_command_can_be_pasted(
    monkeypatch: pytest.MonkeyPatch, openmp: Path | None
) -> None:
    """Red when vllm must be on the path, Intel's OpenMP or large pages are left out,
    all memory must be free, or a key that only serves the measurement is typed."""
    monkeypatch.setattr(demo_report, "intel_openmp", lambda: openmp)
    monkeypatch.delenv("GLIBC_TUNABLES", raising=False)
    if openmp:
        monkeypatch.setenv("GLIBC_TUNABLES", "glibc.malloc.hugetlb=1")
    words = shlex.split(serve_command(side(HYBRID), "a target"))
    if openmp:
        assert words.pop(0) == f"LD_PRELOAD={openmp}"
        assert words.pop(0) == "GLIBC_TUNABLES=glibc.malloc.hugetlb=1"
    *command, spec = words
    vllm = str(Path(sys.executable).parent / "vllm")
    memory = ["--gpu-memory-utilization", "0.25"]
    assert command == [vllm, "serve", "a target", *memory, "--speculative-config"]
    assert json.loads(spec) == {"method": HYBRID, "model": "a head"}


@pytest.mark.parametrize(
    ("speeds", "on_cpu", "signs"),
    [
        ([10, 30, 12, 25], 0.9, None),
        ([10, 30, 13, 30], 0.9, "plain vLLM's speed for one prompt differs 1.3x"),
        (
            [10, 30, 10, 30],
            0.6,
            "the engines had a processor for only 60% of their time",
        ),
        (
            [10, 30, 13, 30],
            0.6,
            "1.3x, and the engines had a processor for only 60% of",
        ),
    ],
)
def test_busy_machine_is_named_with_its_signs(
    speeds: list[float], on_cpu: float, signs: str | None
) -> None:
    """Red when rounds are compared across prompts, or a sign is overlooked."""
    pairs = [pair(CHAT, 2.0, on_cpu, plain) for plain in speeds]
    reason = busy(pairs, rounds=2)
    assert (signs in reason) if reason and signs else reason is signs


def test_pair_weighs_answers_by_their_time() -> None:
    """Red when a short answer counts as much as a long one for a busy machine."""
    results = {
        name: CellResult(
            cell=CHAT,
            seconds=seconds,
            cpu_seconds=cpu_seconds,
            num_tokens=[6],
            tpot_ms=[],
            token_ids=[],
        )
        for name, seconds, cpu_seconds in [(PLAIN, 3.0, 1.5), (SUFFIX, 1.0, 1.0)]
    }
    assert Pair.of(CHAT, results) == Pair(CHAT, {PLAIN: 2.0, SUFFIX: 6.0}, 0.625)
