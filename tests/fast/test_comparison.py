"""Side-by-side runs: prompts, sides, what a run's numbers become. No engine."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from benchmarks.harness import provenance, report
from benchmarks.harness.plan import Plan, base_job, make_plan
from benchmarks.harness.rows import comparison, engines_of
from tests.fast.stored_cells import reported, without_pictures
from vllm_treespec.tools.launch import failure
from vllm_treespec.tools.prompts import PromptError, load_prompts, spread
from vllm_treespec.tools.rows import Mode, summarise, with_speedups
from vllm_treespec.tools.sides import (
    NGRAM,
    Acceptance,
    Cell,
    CellResult,
    Side,
    choose_sides,
    plain_side,
    plain_sides,
    stock_sides,
    tree_side,
    tree_sides,
)

GREEDY = Cell(batch_size=1, temperature=0.0)
SD_6 = tree_side({"method": "sd", "model": "draft", "depth": 6}, eager=True)
SIDES = (plain_side("plain-eager", eager=True), SD_6)
STOCK: list[dict[str, Any]] = [NGRAM, {"method": "draft_model", "model": "draft"}]


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
            mode_steps={"sd 6": 4, "plain": 1},
            mode_seconds={"sd 6": seconds / 2},
            mode_tokens={"sd 6": 7},
        )
        for seconds in (1.0, 2.0, 4.0)
    ]
    row = summarise(SD_6, rounds)
    assert row.modes["sd 6"] == Mode(steps=12, tokens_per_s=21 / 3.5)
    assert row.modes["plain"] == Mode(steps=3)
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


def test_speedup_compares_the_same_rounds() -> None:
    """Red when a machine that slows down between rounds changes speed-ups."""
    plain = summarise(
        plain_side("plain", eager=True), [result(1.0), result(2.0), result(8.0)]
    )
    ours = summarise(SD_6, [result(0.5), result(1.0), result(5.0)])
    one_round_less = summarise(SD_6, [result(0.5), result(0.5)])
    rows = with_speedups([plain, ours, one_round_less])
    assert [row.speedup for row in rows] == [1.0, 2.0, 3.0]


def test_sides_have_distinct_names_and_can_be_chosen() -> None:
    modes = [True, False]
    beams = [{"method": "rsd_s", "beam_width": n, "depth": 3} for n in (2, 3)]
    sides = [*plain_sides(), *stock_sides(STOCK, 6, modes)]
    sides += tree_sides(beams, "draft", modes)
    assert len({side.name for side in sides}) == len(sides)
    chosen = choose_sides(sides, ["rsd_s-2x3", "plain"])
    names = [side.name for side in chosen]
    assert names == ["plain-eager", "plain-compiled", "rsd_s-2x3"]
    with pytest.raises(ValueError, match="no side 'rsd_x'"):
        choose_sides(sides, ["rsd_x"])


def test_stock_speculation_is_never_sampled() -> None:
    greedy_only = [s.name for s in stock_sides(STOCK, 6, [True]) if s.greedy_only]
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


def plan(out: Path, models: str = "weights", sides: tuple[Side, ...] = SIDES) -> Plan:
    """Make a plan of a plain side and one of ours."""
    job = base_job("target", ["hello"], 4)
    return make_plan(job, engines_of(sides, [GREEDY], 2), out, models)


def keep(mine: Plan, name: str, round_: int, measured: CellResult) -> None:
    """Store a measured cell of a side."""
    [job] = [job for r, job in mine.todo() if (r, job.side.name) == (round_, name)]
    mine.keep(job, round_, measured)


def test_finished_cells_are_kept_and_skipped(tmp_path: Path) -> None:
    """Red when broken-off work starts anew, or seeds of two engines are the same."""
    mine = plan(tmp_path)
    assert len({job.seed for _, job in mine.todo()}) == 4
    keep(mine, "plain-eager", 0, result(1.0))
    assert [(r, job.side.name) for r, job in mine.todo()] == [
        (0, "sd-6"),
        (1, "plain-eager"),
        (1, "sd-6"),
    ]
    cells = [GREEDY, GREEDY.model_copy(update={"temperature": 1.0})]
    engines = engines_of(SIDES[:1], cells, 1)
    two = make_plan(base_job("target", ["hello"], 4), engines, tmp_path / "two", "w")
    [(_, first)] = two.todo()
    two.keep(first, 0, result(1.0))
    cut_off = two.file(SIDES[0], cells[1], 0).with_suffix(".partial")
    cut_off.write_text("cut off")
    [(_, later)] = two.todo()
    assert (later.cells, later.side) == (first.cells[1:], first.side)
    assert later.seed != first.seed, "a second start repeats its random numbers"
    content = comparison([GREEDY], mine.finished())
    assert [row["side"] for row in content["rows"]] == ["plain-eager"]


def test_results_hold_sides_that_are_not_in_the_plan(tmp_path: Path) -> None:
    """Red when `--sides` drops what was measured before."""
    mine = plan(tmp_path)
    for side in SIDES[::-1]:
        keep(mine, side.name, 0, result(1.0))
    later = plan(tmp_path, sides=SIDES[:1])
    content = comparison([GREEDY], later.finished())
    assert [row["side"] for row in content["rows"]] == ["plain-eager", "sd-6"]


def test_results_of_other_weights_are_refused(tmp_path: Path) -> None:
    """Red when cells of two models would stand in one table."""
    keep(plan(tmp_path), "sd-6", 0, result(1.0))
    with pytest.raises(ValueError, match="--fresh"):
        plan(tmp_path, models="other weights")
    changed = SD_6.model_copy(update={"engine": {"enforce_eager": False}})
    with pytest.raises(ValueError, match="--fresh"):
        plan(tmp_path, sides=(SIDES[0], changed))
    fresh = make_plan(base_job("target", [], 4), [], tmp_path, "other", fresh=True)
    assert fresh.finished() == []


def test_report_is_made_from_the_results_alone(tmp_path: Path) -> None:
    """Red when the table needs more than results.json, or loses a failure."""
    mine = plan(tmp_path)
    ours = result(
        0.5,
        acceptance=Acceptance(trees=2, nodes=14, at_least=[1]),
        stage_seconds={"forward": 0.25},
        steps=2,
    )
    keep(mine, "plain-eager", 0, result(1.0))
    keep(mine, "sd-6", 0, ours)
    origin = {"command": "python -m benchmarks workloads --x", "commit": "abc"}
    content = report.header(origin, {"ngram": "no luck"}, mine.finished())
    content |= comparison([GREEDY], mine.finished())
    report.write_json(tmp_path, content)
    text = reported(tmp_path)
    line = "| sd-6 | 8.0 (8.0–8.0) | 2.00× | 5.0 | 1.50 | 0.50 | 7.0 |"
    assert f"|  | 1 | 0 {line}" in text
    assert "|  | 1 | 0 | sd-6 | 0% | 50% | 0% | 0% | 0% | 50% |" in text
    assert "- ngram: no luck" in text
    assert "- commit: abc" in text
    assert (tmp_path / "results.png").stat().st_size > 0


RESULTS = sorted(path.parent for path in Path("benchmarks/results").glob("*/*.json"))


@pytest.mark.parametrize("folder", dict.fromkeys(RESULTS), ids=lambda path: path.name)
def test_stored_results_still_make_their_table(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Red when a change of the harness cannot read an older result, or changes its
    table: make it again with `python -m benchmarks report FOLDER`."""
    without_pictures(monkeypatch)
    shutil.copy(folder / "results.json", tmp_path)
    assert reported(tmp_path) == (folder / "results.md").read_text()


def test_provenance_names_command_versions_and_machine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("sys.argv", ["x", "workloads", "--rounds", "2"])
    found = provenance.provenance("workloads")
    assert found["command"] == "python -m benchmarks workloads --rounds 2"
    assert "torch" in found["versions"]
    assert found["machine"]["cores"] >= 1
