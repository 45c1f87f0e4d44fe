"""Side-by-side runs: prompts, sides, what a run's numbers become. No engine."""

import dataclasses
import json
from pathlib import Path

import pytest

from benchmarks import plot, provenance, report
from benchmarks.rounds import Plan, finished_runs, keep, rows_of
from benchmarks.sides import PAPER_TREES, choose, stock_sides, tree_sides, tree_specs
from vllm_treespec.tools.launch import failure
from vllm_treespec.tools.prompts import PromptError, load_prompts, spread
from vllm_treespec.tools.rows import summarise, with_speedups
from vllm_treespec.tools.sides import (
    Acceptance,
    Cell,
    CellResult,
    SideResult,
    plain_side,
    tree_side,
)

GREEDY = Cell(batch_size=1, temperature=0.0)
SD_6 = tree_side({"method": "sd", "model": "draft", "depth": 6}, eager=True)


def result(seconds: float, cell: Cell = GREEDY, **more: object) -> CellResult:
    """Make a result of two answers, of 3 and 1 tokens."""
    return CellResult.model_validate(
        {
            "cell": cell,
            "seconds": seconds,
            "num_tokens": [3, 1],
            "tpot_ms": [10 * seconds, None],
            "token_ids": [[1, 2, 3], [4]],
            **more,
        }
    )


@pytest.mark.parametrize(
    ("row", "prompt"),
    [
        ({"prompt": "a"}, "a"),
        ({"question": "b", "answer": "x"}, "b"),
        ({"turns": ["c", "later"]}, "c"),
        ({"instruction": "d", "input": ""}, "d"),
        ({"instruction": "d", "prompt": "a"}, "a"),
    ],
)
def test_prompt_is_found_under_each_known_key(
    tmp_path: Path, row: dict[str, object], prompt: str
) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(json.dumps(row) + "\n\n")
    assert load_prompts(path) == [prompt]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"prompt": "a"}\n{"text": "b"}\n', "line 2 holds no prompt"),
        ('{"prompt": "a"}\n{"turns": []}\n', "line 2 holds no prompt"),
        ("{oops\n", "line 1 is not JSON"),
        ("\n", "holds no prompts"),
    ],
)
def test_bad_prompt_file_is_refused_by_line(
    tmp_path: Path, text: str, message: str
) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(text)
    with pytest.raises(PromptError, match=message):
        load_prompts(path)


def test_spread_takes_from_all_parts() -> None:
    assert spread(range(80), 4) == [0, 20, 40, 60]
    assert spread(range(3), 8) == [0, 1, 2]


def test_acceptance_counts_from_a_histogram() -> None:
    found = Acceptance.from_histogram(trees=10, nodes=70, accepted={0: 4, 1: 3, 3: 3})
    assert found.at_least == [6, 3, 3]
    # 10 trees emitted 10 + 3 * 1 + 3 * 3 tokens
    assert found.length == pytest.approx(2.2)


def test_acceptance_adds_up_over_depths_that_differ() -> None:
    parts = [
        Acceptance(trees=2, nodes=6, at_least=[1]),
        Acceptance(trees=3, nodes=9, at_least=[2, 1]),
    ]
    total = Acceptance.total(parts)
    assert total == Acceptance(trees=5, nodes=15, at_least=[3, 1])


def test_row_takes_the_median_round_and_pools_acceptance() -> None:
    rounds = [
        result(
            seconds,
            acceptance=Acceptance(trees=2, nodes=14, at_least=[1]),
            stage_seconds={"forward": seconds / 2, "draft": seconds / 4},
            steps=5,
        )
        for seconds in (1.0, 2.0, 4.0)
    ]
    row = summarise(SD_6, rounds)
    assert (row.tokens_per_s_min, row.tokens_per_s, row.tokens_per_s_max) == (1, 2, 4)
    assert row.tpot_ms == pytest.approx(20)
    assert row.acceptance_length == pytest.approx(1.5)
    assert row.acceptance_by_depth == [0.5]
    assert row.mean_nodes == pytest.approx(7)
    assert row.stage_shares["forward"] == pytest.approx(0.5)
    assert row.stage_shares["other"] == pytest.approx(0.25)
    assert row.stage_ms["draft"] == pytest.approx(1000 * 1.75 / 15)


def test_speedup_is_against_the_fastest_plain_side_of_the_cell() -> None:
    sampled = Cell(batch_size=1, temperature=1.0)
    rows = with_speedups(
        [
            summarise(plain_side("slow", eager=True), [result(2.0)]),
            summarise(plain_side("fast", eager=False), [result(1.0)]),
            summarise(SD_6, [result(0.5)]),
            summarise(SD_6, [result(0.5, sampled)]),
        ]
    )
    assert [row.speedup for row in rows] == [0.5, 1.0, 2.0, None]


@pytest.mark.parametrize("budget", PAPER_TREES)
def test_every_tree_fills_its_budget(budget: int) -> None:
    sides = tree_sides(tree_specs([budget], all_trees=True), "draft", [True])
    assert {side.budget for side in sides} == {budget}
    trees = PAPER_TREES[budget]
    assert len(sides) == 1 + len(trees.rsd_c) + len(trees.rsd_s)


def test_sides_have_distinct_names_and_can_be_chosen() -> None:
    modes = [True, False]
    sides = stock_sides("draft", 6, modes)
    sides += tree_sides(tree_specs(list(PAPER_TREES), True), "draft", modes)
    assert len({side.name for side in sides}) == len(sides)
    chosen = choose(sides, ["rsd_s-2x3", "plain"])
    names = [side.name for side in chosen]
    assert names == ["plain-eager", "plain-compiled", "plain-default", "rsd_s-2x3"]
    with pytest.raises(ValueError, match="no side 'rsd_x'"):
        choose(sides, ["rsd_x"])


def test_stock_speculation_is_never_sampled() -> None:
    greedy_only = [s.name for s in stock_sides("draft", 6, [True]) if s.greedy_only]
    assert greedy_only == ["ngram-6", "draft_model-6"]


def test_failure_names_the_cause_in_one_line(tmp_path: Path) -> None:
    log = tmp_path / "engine.log"
    log.write_text(
        "Traceback (most recent call last):\n"
        "(EngineCore pid=3) vllm_treespec.config.SpecConfigError: no 'depth'; add it\n"
        "RuntimeError: Engine core initialization failed. See root cause above.\n"
    )
    assert failure(1, log) == "vllm_treespec.config.SpecConfigError: no 'depth'; add it"
    log.write_text(
        "Traceback (most recent call last):\n"
        "vllm_treespec.config.SpecConfigError: \n\n'depth' is 0;\nwrite more\n\nbye\n"
    )
    says = "vllm_treespec.config.SpecConfigError: 'depth' is 0; write more"
    assert failure(1, log) == says
    log.write_text("nothing of use\n")
    assert "status 3" in failure(3, log)
    assert "killed" in failure(-9, log)


def plan(out: Path, models: str = "weights") -> Plan:
    """Make a plan of a plain side and two of ours."""
    return Plan(
        sides=[plain_side("plain-eager", eager=True), SD_6],
        rounds=2,
        cells=[GREEDY],
        prompts=["hello"],
        target="target",
        max_tokens=4,
        out=out,
        models=models,
        commit="abc",
    )


def test_finished_runs_are_kept_and_skipped(tmp_path: Path) -> None:
    mine = plan(tmp_path)
    assert len(mine.todo()) == 4
    _, side = mine.todo()[0]
    job = mine.job(side, 0)
    keep(mine, job, 0, SideResult(start_seconds=1.0, cells=[result(1.0)]))
    assert [(r, s.name) for r, s in mine.todo()] == [
        (0, "sd-6"),
        (1, "plain-eager"),
        (1, "sd-6"),
    ]
    [run] = finished_runs(mine)
    assert [row.side for row in rows_of(mine, [run])] == ["plain-eager"]


def test_report_holds_runs_of_sides_that_are_not_in_the_plan(tmp_path: Path) -> None:
    mine = plan(tmp_path)
    for side in mine.sides[::-1]:
        measured = SideResult(start_seconds=1.0, cells=[result(1.0)])
        keep(mine, mine.job(side, 0), 0, measured)
    later = dataclasses.replace(mine, sides=mine.sides[:1])
    rows = rows_of(later, finished_runs(later))
    assert [row.side for row in rows] == ["plain-eager", "sd-6"]


def test_runs_of_other_weights_are_refused(tmp_path: Path) -> None:
    mine = plan(tmp_path)
    job = mine.job(mine.sides[0], 0)
    keep(mine, job, 0, SideResult(start_seconds=1.0, cells=[result(1.0)]))
    with pytest.raises(ValueError, match="--fresh"):
        finished_runs(plan(tmp_path, models="other weights"))


def test_reports_hold_every_side(tmp_path: Path) -> None:
    ours = result(
        0.5,
        acceptance=Acceptance(trees=2, nodes=14, at_least=[1]),
        stage_seconds={"forward": 0.25},
        steps=2,
    )
    rows = with_speedups(
        [
            summarise(plain_side("plain-eager", eager=True), [result(1.0)]),
            summarise(SD_6, [ours]),
        ]
    )
    text = report.markdown(rows, {"ngram": "no luck"}, {"commit": "abc"})
    assert "| sd-6 | 6 | 8.0 (8.0–8.0) | 2.00× |" in text
    assert "- ngram: no luck" in text
    assert "- commit: abc" in text
    plot.draw(rows, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 0


def test_provenance_names_command_versions_and_machine() -> None:
    found = provenance.provenance(["--rounds", "2"])
    assert found["command"] == "python -m benchmarks.run --rounds 2"
    assert "torch" in found["versions"]
    assert found["machine"]["cores"] >= 1
