"""EAGLE's experiment: sides, rows, trained heads, report. No engine."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from benchmarks.__main__ import app
from benchmarks.eagle import plain_step
from benchmarks.eagle.experiment import evidence
from benchmarks.eagle.parts import (
    DFLASH_TREES,
    EAGLE_TREES,
    KINDS,
    REDRAFTER_TREES,
    all_sides,
    engines_of,
    entries_of,
    trees_by_kind,
)
from benchmarks.eagle.plain_step import IN_TURN, PLAIN_STEP
from benchmarks.eagle.trainings import chain_length, read_trainings
from benchmarks.harness import head_parts, plot, report
from benchmarks.harness.experiment import identity
from benchmarks.harness.models import Models, models_of
from benchmarks.harness.plan import Plan, base_job, make_plan
from benchmarks.harness.rows import Entry, rows_of
from tests.fast.stored_cells import keep, measured, reported
from tests.fast.test_redrafter_benchmark import head_folders
from tests.published_dflash import PublishedDFlash
from tests.published_heads import PublishedHead
from vllm_treespec.batch.stats import StepStats
from vllm_treespec.config import parse_spec_config
from vllm_treespec.schedule.listed import ListedSchedule
from vllm_treespec.schedule.plan import PLAIN_PLAN, RunningRequests, StepPlan
from vllm_treespec.tools import side_engine
from vllm_treespec.tools.sides import Acceptance, Cell, CellResult

TREES = trees_by_kind(EAGLE_TREES, REDRAFTER_TREES, DFLASH_TREES)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    """Tiny heads of all kinds."""
    folder = tmp_path_factory.mktemp("heads")
    heads = head_folders(folder)
    heads["eagle"] = str(PublishedHead().write(folder / "eagle"))
    block = PublishedDFlash("dspark", markov_rank=2, block_size=7)
    heads["dflash"] = str(block.write(folder / "dflash"))
    return Models("target", "draft", heads)


def finish(entry: Entry, mine: Plan, length: float, seconds: float = 1.0) -> None:
    """Store a cell of 100 steps that accepted ``length`` - 1 drafts each."""
    stages = {"forward": 0.6, "draft": 0.2, "tree_build": 0.05, "score": 0.02}
    stages |= {"commit": 0.01, "draft_forward": 0.1}
    if entry.cell.measure:
        stages |= {"keep_features": 0.01, "pairs": 0.04, "levels": 0.08}
    at_least = [round(100 * (length - 1))]
    drafted = {
        "acceptance": Acceptance(trees=100, nodes=600, at_least=at_least),
        "stage_seconds": stages,
        "steps": 100,
    }
    result = CellResult.model_validate(
        {
            "cell": entry.cell,
            "seconds": seconds,
            "num_tokens": [50],
            "tpot_ms": [1.0],
            "token_ids": [[1] * 50],
            **(drafted if entry.cell.tree else {}),
        }
    )
    keep(mine, entry.side, result)


def plan_of(models: Models, out: Path) -> tuple[list[Entry], Plan]:
    """All entries, and the plan of their engines."""
    sides = all_sides(models, TREES, eager=False, stock_depth=6)
    entries = entries_of(sides, TREES, [0.0, 1.0])
    engines = engines_of(sides, entries, num_prompts=2, rounds=3)
    return entries, make_plan(base_job("target", ["a", "b"], 8), engines, out, "x")


def test_one_engine_draws_all_trees_of_a_kind(models: Models, tmp_path: Path) -> None:
    """Red when a kind starts several engines, or a cell's tree is in no schedule."""
    entries, mine = plan_of(models, tmp_path)
    # Each at two temperatures, but for the two stock methods.
    assert len({entry.label for entry in entries}) == len(entries) / 2 + 1
    first = [job for round_, job in mine.todo() if round_ == 0]
    names = [job.side.name for job in first]
    assert names[:3] == ["plain-eager", "plain-compiled", "ngram-6-compiled"]
    assert names[3] == "draft_model-6-compiled"
    assert names[-len(KINDS) - 1 :] == [*KINDS, PLAIN_STEP]
    assert all(job.side.engine["enforce_eager"] is False for job in first[1:])
    for job in first[-len(KINDS) - 1 : -1]:
        config = parse_spec_config(job.side.engine["speculative_config"])
        trees = [tree.config for tree in config.scheduled_trees()]
        for cell in job.cells:
            assert cell.tree is not None
            assert any(tree == tree.with_shape(cell.tree) for tree in trees), cell.name
    [cell] = first[-1].cells
    assert (cell.measure, cell.num_prompts) == (IN_TURN, 8)


def test_stock_ngram_is_greedy_and_suffix_trees_see_their_own_text(
    models: Models, tmp_path: Path
) -> None:
    """Red when a cell would be helped by an earlier one, or stock samples wrongly."""
    entries, _ = plan_of(models, tmp_path)
    assert [e.cell.temperature for e in entries if e.side.family == "ngram"] == [0.0]
    side = next(e.side for e in entries if e.side.family == "suffix_tree")
    assert side.engine["speculative_config"]["max_cached_tokens"] == 0


@pytest.mark.parametrize("text", ["4x3", "4x3xmany", "4x3x-8"])
def test_trees_are_read_or_refused(text: str) -> None:
    with pytest.raises(ValueError, match="top_k x depth x num_drafts"):
        trees_by_kind(text, REDRAFTER_TREES, DFLASH_TREES)


def test_heads_that_are_not_there_leave_their_sides_out(
    models: Models, capsys: pytest.CaptureFixture[str]
) -> None:
    """Red when a missing head ends the experiment, or another kind passes for it."""
    redrafter = models.heads["redrafter"]
    named = {"eagle": ("--head", ""), "redrafter": ("--redrafter", redrafter)}
    found = models_of("target", "none", named)
    assert found.heads == {"redrafter": redrafter}
    assert "name one with --head" in capsys.readouterr().err
    names = {side.name for side in all_sides(found, TREES, True, 6)}
    assert "redrafter-dynamic" in names
    assert not names & {"medusa_tree", "eagle_tree-dynamic", PLAIN_STEP}
    with pytest.raises(ValueError, match=r"--head: .* holds no eagle head"):
        models_of("target", "none", {"eagle": ("--head", redrafter)})


def test_a_head_that_comes_later_changes_no_other_side(models: Models) -> None:
    """Red when all is measured anew for a new head, or old cells pass for its own."""
    sides = {side.name: side for side in all_sides(models, TREES, True, 6)}
    folder = models.heads["eagle"]
    old: dict[str, dict[str, str]] = {}
    new = {folder: {"sha256": "other"}}
    for name in ("plain-eager", "ngram-6", "redrafter-dynamic"):
        assert identity(old, sides[name]) == identity(new, sides[name])
    eagle = sides["eagle_tree-static"]
    assert identity(old, eagle) != identity(new, eagle)


def test_the_fastest_plain_side_is_the_baseline(models: Models, tmp_path: Path) -> None:
    """Red when a tree's cell finds no plain one, or the slower of two is taken."""
    entries, mine = plan_of(models, tmp_path)
    for entry in entries:
        slow = 2.0 if entry.side.name == "plain-eager" else 1.0
        length = 2.0 if entry.kind == "eagle_tree-dynamic" else 1.5
        finish(entry, mine, length, slow if entry.cell.tree is None else 0.5)
    rows = {(r.side, r.cell.temperature): r for r in rows_of(entries, mine.finished())}
    assert len(rows) == len(entries)
    row = rows["eagle_tree-dynamic-16", 1.0]
    assert (row.budget, row.speedup) == (16, pytest.approx(2.0))
    assert rows["plain-eager", 0.0].speedup == 0.5
    assert row.acceptance_length == pytest.approx(2.0)
    assert row.stage_ms["pairs"] == pytest.approx(0.4)


def training(
    folder: Path,
    accuracies: list[float],
    text: str = "",
    config: dict[str, Any] | None = None,
    **options: Any,
) -> None:
    """Write what training notes of a head; without a config it is an EAGLE head."""
    folder.mkdir(parents=True)
    levels = enumerate(accuracies, 1)
    result = {f"accuracy_{i}": share for i, share in levels}
    result |= {key.replace("accuracy", "acceptance"): 0.5 for key in result}
    layers = [2, 15, 27] if options.pop("three", True) else [-1]
    record = {
        "conversations": 90,
        "answer_positions": 1000,
        "result": {**result, "steps": 100, "positions": 2000, "size_mb": 8.0},
        "training": options,
        "teacher": {"layers": layers},
    }
    config = config or {}
    if len(config) > 1:
        record["head"] = config
    (folder / "training.json").write_text(json.dumps(record))
    (folder / "config.json").write_text(json.dumps(config))
    if text:
        found = {
            "text": [text],
            "accuracies": [[a / 2] for a in accuracies],
            "acceptance": [0.25],
        }
        (folder / "evaluation.json").write_text(json.dumps(found))


def test_trained_heads_make_curve_ablation_and_levels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Red when heads of other options are in one curve, or a record is not read."""
    heads, out = tmp_path / "heads", tmp_path / "out"
    training(heads / "full", [0.6, 0.5], steps=3, text_share=1.0)
    training(heads / "half", [0.5, 0.5], steps=3, text_share=0.5)
    training(heads / "one", [0.5, 0.4], steps=3, text_share=1.0, three=False)
    training(heads / "first", [0.5, 0.1], steps=1, text_share=1.0, three=False)
    medusa = {"method": "medusa"}
    training(heads / "medusa", [0.4], "mtbench.jsonl", medusa, level_share=0.8)
    for name, rank in (("told", 64), ("untold", 0)):
        form = {"method": "lyanna", "token_info_rank": rank, "first_token": True}
        accuracies = [0.5, 0.3 if rank else 0.2]
        training(heads / name, accuracies, config=form, steps=3, three=False)
    draft = heads / "draft" / "training.json"
    draft.parent.mkdir()
    draft.write_text('{"draft": {}}')
    found = {t["name"]: t for t in read_trainings(heads)}
    assert chain_length(found["full"]) == pytest.approx(1.9)
    assert found["medusa"]["accuracy"] == [0.2]
    monkeypatch.setattr(plot, "bar_panels", lambda *args, **options: None)
    command = ["eagle", "--target", "target", "--draft", "none", "--sides", "none"]
    command += ["--trainings", str(heads), "--out", str(out)]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.output
    text = (out / "results.md").read_text()
    curve = text.split("## Scaling")[1].split("##")[0]
    assert [line[:8] for line in curve.splitlines()[4:-1]] == ["| half |", "| full |"]
    assert "## Heads on mtbench.jsonl" in text
    eagle = text.split("## Ablation of EAGLE heads")[1].split("##")[0]
    assert "| full |" in eagle
    assert "told" not in eagle
    lyanna = text.split("## Ablation of Lyanna heads")[1].split("##")[0]
    rows = lyanna.splitlines()[4:-1]
    assert [row.split(" | ")[0] for row in rows] == ["| untold", "| told"]
    assert " | True | – | 64 | – | " in rows[1]
    assert (out / "scaling.png").stat().st_size > 0


def test_report_is_made_from_the_results_alone(models: Models, tmp_path: Path) -> None:
    """Red when tables need more than results.json, or a part of the step is lost."""
    entries, mine = plan_of(models, tmp_path)
    for entry in entries:
        finish(entry, mine, 1.8)
    [step] = [e for e in mine.engines if e.side.name == PLAIN_STEP]
    times: dict[str, list[float | None]]
    times = {"ours_ms": [20.2, 20.1], "plain_ms": [20.0, 20.0]}
    stages = {"draft": 0.02, "tree_build": 0.01, "keep_features": 0.01}
    result = measured(
        step.cells[0],
        0.0,
        num_tokens=[8, 8],
        tpot_ms=times["ours_ms"],
        steps=100,
        stage_seconds=stages,
        details=times,
    )
    keep(mine, step.side, result)
    origin = {"command": "python -m benchmarks eagle", "commit": "abc"}
    content = report.header(origin, {}, mine.finished())
    report.write_json(tmp_path, content | evidence(entries, [], mine.finished()))
    text = reported(tmp_path)
    numbers = "| 8 | 1.80 ± 0.04 | 50.0 (50.0–50.0) | 1.00× | 6.0 |"
    assert f"| eagle_tree-static-8 {numbers}" in text
    parts = "| 6.00 | 0.40 | 0.80 | 0.10 | 1.20 | 0.20 | 0.10 | 10.00 |"
    assert f"| eagle_tree-static-8 {parts}" in text
    assert "| 2 | 20.150 | 20.000 | 1.0075 | 0.300 | 0.100 |" in text
    for name in ("tokens", "speed"):
        assert (tmp_path / f"{name}.png").stat().st_size > 0


class Head:
    """A head whose parts take no time."""

    def __init__(self) -> None:
        self.stats = StepStats()

    def keep(self, tokens: int) -> int:
        return tokens

    read = begin = root_logits = extend = keep


def test_parts_of_the_head_are_timed_once() -> None:
    """Red when a part is not timed, is timed twice, or loses its result."""
    head = Head()
    runner = SimpleNamespace(drafter=SimpleNamespace(paged=[head]))
    head_parts.time_parts(SimpleNamespace(model_runner=runner))
    first = vars(head)["read"]
    head_parts.time_parts(SimpleNamespace(model_runner=runner))
    assert vars(head)["read"] is first
    found = [head.keep(1), head.read(2), head.begin(3), head.extend(4)]
    assert found == [1, 2, 3, 4]
    assert list(head.stats.as_dict()["seconds"]) == ["pairs", "levels"]


def test_a_step_without_trees_stays_plain() -> None:
    """Red when emptying the schedule does not make steps plain."""
    spec = {"method": "suffix_tree", "schedule": "fixed"}
    schedule = ListedSchedule(parse_spec_config(spec).scheduled_trees())
    requests = RunningRequests(1, [0], [False], [63], [0])
    assert schedule.plan(requests) == StepPlan(0, [0], lookup=True)
    decoder = SimpleNamespace(method=SimpleNamespace(schedule=schedule))
    runner = SimpleNamespace(decoder=decoder)
    plain_step.draw_no_trees(SimpleNamespace(model_runner=runner))
    assert schedule.plan(requests) == PLAIN_PLAN


def test_answers_are_timed_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Red when one engine is always first, or the times change places."""
    order: list[str] = []

    class Engine:
        def __init__(self, job: Any) -> None:
            self.job, self.name = job, job.side.name
            self.llm = SimpleNamespace(collective_rpc=lambda call: order.append("rpc"))

        def prompts_of(self, cell: Cell) -> list[str]:
            return ["a", "b", "c"]

        def params(self, temperature: float, max_tokens: int) -> None:
            return None

        def generate(self, prompts: Any, params: None, batch_size: int) -> list[Any]:
            order.append(self.name)
            answer = SimpleNamespace(token_ids=[1, 2])
            return [SimpleNamespace(name=self.name, outputs=[answer])]

        def read_counters(self) -> list[int]:
            order.clear()
            return []

        def add_acceptance(self, result: CellResult, before: list[int]) -> None:
            result.steps = 3

    monkeypatch.setattr(side_engine, "SideEngine", Engine)
    times = {PLAIN_STEP: 2.0, "plain": 1.0}
    monkeypatch.setattr(side_engine, "tpot_ms", lambda output: times[output.name])
    cell = Cell(batch_size=1, temperature=0.0, measure=IN_TURN)
    job = base_job("target", ["a"], 8)
    side = SimpleNamespace(name=PLAIN_STEP, engine={"enforce_eager": True})
    engine: Any = Engine(job.model_copy(update={"side": side}))
    result = plain_step.in_turn(engine, cell)
    ours = PLAIN_STEP
    assert order == [ours, "plain", "plain", ours, ours, "plain"]
    assert result.details == {"ours_ms": [2.0] * 3, "plain_ms": [1.0] * 3}
    assert result.steps == 3
