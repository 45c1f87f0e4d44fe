"""``treespec tune``: what is measured, what is chosen. Engines are stood in for."""

from __future__ import annotations

import json
from collections.abc import Callable, Generator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tests.heads import write_head
from vllm_treespec.cli import app
from vllm_treespec.config import parse_spec_config
from vllm_treespec.tools import sides as sides_module
from vllm_treespec.tools.launch import EngineError, Event
from vllm_treespec.tools.sides import PLAIN, Acceptance, Cell, CellResult, Job, Side
from vllm_treespec.tools.tune.candidates import candidates
from vllm_treespec.tools.tune.choose import choose
from vllm_treespec.tools.tune.search import ROUNDS, Search, TreeRow

# Speed-up over plain's 100 tokens a second, by method, first size of the tree, and
# requests at a time.
Speeds = Callable[[str, int, Cell], float]
LOADS = [
    Cell(batch_size=size, temperature=0.0, workload="chat, short/long")
    for size in (1, 4)
]


class Engines:
    """Stands in for engines; notes what they measured."""

    def __init__(self, speeds: Speeds, cut_after: int | None = None) -> None:
        """Answer at these speeds; end as by a kill after so many cells."""
        self.speeds = speeds
        self.cut_after = cut_after
        self.measured: list[tuple[str, str]] = []

    def __call__(self, job: Job, log: Path) -> Generator[Event]:
        """Measure the cells of a job."""
        for cell in job.cells:
            if len(self.measured) == self.cut_after:
                raise KeyboardInterrupt
            first = next(iter((cell.tree or {"": 0}).values()))
            speed = 100.0 * cell.batch_size
            if job.side.family != PLAIN:
                speed *= self.speeds(job.side.family, first, cell)
            result = CellResult(
                cell=cell,
                seconds=1000 / speed,
                num_tokens=[1000],
                tpot_ms=[None],
                token_ids=[[1]],
                acceptance=Acceptance(trees=10, nodes=50, at_least=[8]),
            )
            self.measured.append((job.side.name, cell.name))
            yield {"event": "cell", "result": result.model_dump(mode="json")}


def suffix_pays(method: str, size: int, cell: Cell) -> float:
    """The suffix tree of 16 drafts pays alone, the one of 8 in larger batches."""
    if method != "suffix_tree":
        return 0.5
    alone = {8: 1.4, 16: 1.5, 32: 1.1}[size]
    return alone if cell.batch_size == 1 else max(alone - 0.0375 * size, 0.1)


def write_config(folder: Path) -> str:
    """Write as much of a model as is read before engines start; its folder."""
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "llama"}')
    return str(folder)


def test_models_are_tried_alone_and_beside_the_index(tmp_path: Path) -> None:
    """Red when tune leaves a method out that has its model, or tries one it cannot."""
    heads = [
        write_head(tmp_path / kind, kind) for kind in ("redrafter", "medusa", "eagle")
    ]
    sides, specs = candidates(["draft"], heads, eager=False)
    assert [side.name for side in sides] == [PLAIN, *specs]
    beside = {
        name: spec["drafter"] for name, spec in specs.items() if "drafter" in spec
    }
    assert beside == {
        "hybrid redrafter": "redrafter",
        "hybrid eagle": "eagle",
        "hybrid draft": "draft_model",
    }
    assert {spec["method"] for spec in specs.values() if "drafter" not in spec} == {
        "suffix_tree", "redrafter", "medusa_tree", "eagle_tree", "sd", "rsd_s"
    }  # fmt: skip


def search(out: Path, engines: Engines, seconds: float = 1e9, **more: Any) -> Search:
    """Make a search over suffix trees and a head."""
    head = more.pop("head", None) or write_head(out / "head", "redrafter")
    sides, _ = candidates([], [head], eager=False)
    unset = Side(name="", family="", engine={})
    job = Job(side=unset, target="t", prompts=[], cells=[], max_tokens=8)
    return Search(job, sides, LOADS, out, seconds, more, lambda *_: None, engines)


def test_the_best_tree_of_each_batch_size_is_chosen(tmp_path: Path) -> None:
    """Red when a slower tree is chosen, or the spec-config cannot be used."""
    rows = search(tmp_path, Engines(suffix_pays)).run()
    choice = choose(rows, {"suffix_tree": {"method": "suffix_tree"}, "redrafter": {}})
    assert choice.side == "suffix_tree"
    assert choice.speedup == pytest.approx((1.5 * 1.1) ** 0.5)
    assert choice.spec is not None
    trees = parse_spec_config(choice.spec).scheduled_trees()
    assert [(t.batch_size, t.config.shape["num_drafts"]) for t in trees] == [
        (1, 16),
        (4, 8),
    ]
    # 1.8 tokens a step at a speed-up of 1.5, and of 1.1
    assert [t.min_acceptance_length for t in trees] == [1.2, 1.64]


def test_from_where_nothing_pays_there_is_no_tree(tmp_path: Path) -> None:
    """Red when a schedule has a tree for batches in which plain decoding is faster."""

    def speeds(method: str, size: int, cell: Cell) -> float:
        return 1.5 if cell.batch_size == 1 else 0.9

    rows = search(tmp_path, Engines(speeds)).run()
    choice = choose(rows, {"suffix_tree": {"method": "suffix_tree"}})
    assert choice.spec is not None
    assert [entry["batch_size"] for entry in choice.spec["schedule"]] == [1]
    assert choice.speedup == pytest.approx(1.5**0.5)
    slow = [row.model_copy(update={"speedup": 0.9}) for row in rows]
    assert choose(slow, {"suffix_tree": {}}).spec is None


def test_where_some_work_loses_the_schedule_measures(tmp_path: Path) -> None:
    """Red when trees are fixed under a load for which they are slower than plain."""
    engines = Engines(lambda method, size, cell: 2.0 - 0.5 * (cell.batch_size == 4))
    rows = search(tmp_path, engines).run()
    cells = [row.cell.model_copy(update={"workload": "code"}) for row in rows]
    slow = [
        row.model_copy(update={"cell": cell, "speedup": 0.9})
        for row, cell in zip(rows, cells, strict=True)
    ]
    spec = {"method": "suffix_tree", "max_cached_tokens": 0}
    choice = choose([*rows, *slow], {"suffix_tree": spec})
    assert choice.slower
    assert choice.spec is not None
    assert "schedule" not in choice.spec
    assert parse_spec_config(choice.spec).shape["num_drafts"] in (8, 16)
    assert not choose(rows, {"suffix_tree": spec}).slower


def test_far_behind_is_measured_once(tmp_path: Path) -> None:
    """Red when slow trees take the time of fast ones."""
    engines = Engines(suffix_pays)
    rows = search(tmp_path, engines).run()
    plain = [row.rounds for row in rows if row.side == PLAIN]
    slow = [row.rounds for row in rows if row.side == "redrafter"]
    best = [row.rounds for row in rows if row.tree == {"num_drafts": 16, "depth": 12}]
    assert (set(plain), set(slow)) == ({ROUNDS}, {1})
    assert best == [ROUNDS, 1], "fast for one request, slow for four"
    assert len(engines.measured) == sum(row.rounds for row in rows)


def test_a_cut_search_goes_on(tmp_path: Path) -> None:
    """Red when a cut loses a cell, or one is measured again."""
    head = write_head(tmp_path / "head", "redrafter")
    rows = search(tmp_path / "whole", Engines(suffix_pays), head=head).run()
    first, then = Engines(suffix_pays, cut_after=7), Engines(suffix_pays)
    with pytest.raises(KeyboardInterrupt):
        search(tmp_path / "cut", first, head=head).run()
    again = search(tmp_path / "cut", then, head=head).run()
    assert by_name(again) == by_name(rows)
    assert len(first.measured) + len(then.measured) == sum(row.rounds for row in rows)
    with pytest.raises(ValueError, match="other settings"):
        search(tmp_path / "cut", then, head=head, other=1)


def test_a_side_may_be_gone(tmp_path: Path) -> None:
    """Red when a search without a head is refused where one with it has been."""
    whole = search(tmp_path, Engines(suffix_pays))
    whole.run()
    left = [side for side in whole.sides if side.family in (PLAIN, "suffix_tree")]
    rows = replace(whole, sides=left).rows()
    assert {row.side for row in rows} == {PLAIN, "suffix_tree"}


def by_name(rows: list[TreeRow]) -> dict[tuple[str, str, str], tuple[float, int]]:
    """Speeds and rounds of rows."""
    return {
        (row.side, row.cell.name, str(row.tree)): (row.tokens_per_s, row.rounds)
        for row in rows
    }


def test_the_time_ends_it(tmp_path: Path) -> None:
    """Red when engines start after the time, or nothing is compared with plain."""
    engines = Engines(suffix_pays)
    rows = search(tmp_path, engines, seconds=0.0).run()
    assert {row.side for row in rows} == {PLAIN, "suffix_tree"}
    assert all(row.rounds == 1 and row.speedup for row in rows)


def test_the_command_prints_and_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Red when the command, its files or its sentences break."""

    def fails(job: Job, log: Path) -> Generator[Event]:
        if job.side.family == "redrafter":
            raise EngineError("redrafter: ValueError: wrong head")
        yield from Engines(suffix_pays)(job, log)

    monkeypatch.setattr(sides_module, "side_events", fails)
    head, out = write_head(tmp_path / "head", "redrafter"), tmp_path / "out"
    target = write_config(tmp_path / "target")
    command = ["tune", target, "--head", head, "--out", str(out)]
    done = CliRunner().invoke(app, [*command, "--batch-sizes", "1,4"])
    assert done.exit_code == 0, done.output
    assert "editing, 1 request at a time, temperature 0: suffix_tree" in done.output
    assert "left out: redrafter: redrafter: ValueError: wrong head" in done.output
    spec = json.loads((out / "spec.json").read_text())
    assert spec["method"] == "suffix_tree"
    assert "max_cached_tokens" not in spec
    assert json.loads((out / "tune.json").read_text())["failed"]
    assert (out / "tune.png").stat().st_size > 0


@pytest.mark.parametrize(
    ("failing", "says", "engines"),
    [
        ({PLAIN}, "treespec tune: plain: broken (log: ", 1),
        ({"suffix_tree"}, "treespec tune: nothing was measured beside plain", 2),
    ],
)
def test_where_nothing_is_compared_there_is_no_answer(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    failing: set[str],
    says: str,
    engines: int,
) -> None:
    """Red when plain vLLM is called best because nothing else has run."""
    started: list[str] = []

    def fails(job: Job, log: Path) -> Generator[Event]:
        started.append(job.side.name)
        if job.side.name in failing:
            raise EngineError(f"{job.side.name}: broken (log: {log})")
        yield from Engines(suffix_pays)(job, log)

    monkeypatch.setattr(sides_module, "side_events", fails)
    out = tmp_path / "out"
    target = write_config(tmp_path / "target")
    done = CliRunner().invoke(app, ["tune", target, "--out", str(out)])
    assert done.exit_code == 1
    assert says in done.output
    assert f"broken (log: {out / 'logs'}" in done.output
    assert "is best" not in done.output
    assert len(started) == engines


@pytest.mark.parametrize("named", [None, 0.5])
def test_requests_are_sampled_as_the_target_asks(named: float | None) -> None:
    """Red when tune measures other requests than ``vllm serve`` would answer."""
    pytest.importorskip("vllm", reason="needs vLLM")
    from vllm_treespec.tools.side_engine import SideEngine

    engine = SideEngine.__new__(SideEngine)
    side = Side(name="", family="", engine={})
    engine.job = Job(side=side, target="t", prompts=[], cells=[], max_tokens=8)
    engine.job.top_p = named
    engine.defaults = {"top_p": 0.8, "repetition_penalty": 1.1, "temperature": 0.7}
    params = engine.params(0.3, 5)
    assert (params.temperature, params.max_tokens) == (0.3, 5)
    assert (params.top_p, params.repetition_penalty) == (named or 0.8, 1.1)
    engine.defaults, engine.job.repetition_penalty = {}, 1.2
    params = engine.params(0.3, 5)
    assert (params.top_p, params.repetition_penalty) == (named or 1.0, 1.2)
