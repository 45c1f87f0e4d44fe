"""The paper's experiments: trees, metrics, tests of the law, resuming. No engine."""

import itertools
import json
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from benchmarks.__main__ import app
from benchmarks.harness import report
from benchmarks.harness.models import num_parameters
from benchmarks.harness.plan import Engine, Plan, base_job, make_plan
from benchmarks.harness.rescoring import split_scores
from benchmarks.harness.rows import standard_error
from benchmarks.rsd import experiment, toy
from benchmarks.rsd.experiment import engines_of
from benchmarks.rsd.law import comparisons
from benchmarks.rsd.metrics import best_of, mbsu, rows_of
from benchmarks.rsd.report import smallest_p_value
from benchmarks.rsd.trees import (
    METHODS,
    Tree,
    all_trees,
    tree_of,
    trees_of,
)
from tests.fast.stored_cells import keep, measured, store_scores, without_pictures
from vllm_treespec.config import parse_spec_config
from vllm_treespec.tools.assets import shipped_drafter
from vllm_treespec.tools.sides import (
    PLAIN,
    Acceptance,
    Cell,
    plain_side,
)

SD_2 = Tree("sd", (2,))
RSD_S = Tree("rsd_s", (3, 2))
RSD_C = Tree("rsd_c", (2, 2))


def test_size_of_a_tree_is_what_its_proposer_draws() -> None:
    """Red when a method's keys or the size of its trees change."""
    for tree in all_trees():
        config = parse_spec_config(tree.spec_config("draft"))
        assert config.proposer().sizes.max_nodes - 1 == tree.num_drafts, tree
        assert tree_of(tree.method, tree.shape) == tree


def test_trees_of_a_length_are_no_larger_than_the_binary_tree() -> None:
    """Red when a tree of D.3.1 is mistyped: depth, or larger than RSD-C with twos."""
    for length, trees in trees_of("lengths").items():
        assert {tree.depth for tree in trees} == {length}
        binary = Tree("rsd_c", (2,) * length)
        assert binary in trees
        assert max(tree.num_drafts for tree in trees) == binary.num_drafts


def test_trees_of_a_budget_fill_it() -> None:
    """Red when a tree of D.3.2 is mistyped for a method that sides.py leaves out."""
    for budget, trees in trees_of("budgets").items():
        assert {tree.num_drafts for tree in trees} == {budget}
        assert {tree.method for tree in trees} == set(METHODS)


def test_both_experiments_share_trees() -> None:
    """Red when a tree of both experiments is measured twice."""
    trees = all_trees()
    assert len({tree.name for tree in trees}) == len(trees) == 63


# Llama 2-7B with the 115M drafter on XSum: arXiv 2402.14160, table 1.
def test_mbsu_gives_the_published_values() -> None:
    """Red when the ratio of sizes is turned round, as the appendix's text has it."""
    efficiencies, ratio = (2.166, 2.970, 3.535, 3.492), 0.117 / 6.74
    found = [mbsu(value, depth, ratio) for depth, value in enumerate(efficiencies, 2)]
    assert found == pytest.approx([2.093, 2.823, 3.306, 3.213], abs=2e-3)


def test_parameters_are_counted_in_the_weights() -> None:
    """Red when counts no longer come from the files' shapes."""
    assert num_parameters(shipped_drafter()) == 11_208_000
    with pytest.raises(ValueError, match="holds no"):
        num_parameters("no/such/folder")


def test_standard_error_is_that_of_the_accepted_counts() -> None:
    """Red when the error is not taken over the steps."""
    accepted = [0, 0, 1, 1, 1, 3, 3, 0, 2, 1]
    counts = {d: accepted.count(d) for d in range(4)}
    acceptance = Acceptance.from_histogram(trees=10, nodes=70, accepted=counts)
    expected = np.std(accepted) / np.sqrt(10)
    assert standard_error(acceptance) == pytest.approx(expected)


def plan(out: Path, trees: list[Tree], weights: str = "weights") -> Plan:
    """Make a plan with two prompts."""
    plain = [Cell(batch_size=1, temperature=t) for t in (0.3, 1.0)]
    engines = [
        Engine(plain_side(PLAIN, eager=True), plain, rounds=2),
        *engines_of(trees, "draft", plain, rounds=1),
    ]
    job = base_job("target", ["hello", "good morning"], max_tokens=4)
    return make_plan(job, engines, out, weights)


def finish(
    mine: Plan, engine: Engine, cell: Cell, seconds: float = 1.0, emitted: int = 3
) -> None:
    """Store all rounds of a cell of two answers of three tokens."""
    drafted = Acceptance(trees=2, nodes=6, at_least=[emitted - 2])
    result = measured(
        cell,
        seconds,
        num_tokens=[3, 3],
        tpot_ms=[None, None],
        token_ids=[[1, 2, 3], [1, 2, 4]],
        acceptance=drafted if cell.tree else None,
    )
    for round_ in range(engine.rounds):
        keep(mine, engine.side, result, round_)


def test_one_engine_runs_all_trees_of_a_method(tmp_path: Path) -> None:
    """Red when a method needs more than one engine a round, or one too small."""
    mine = plan(tmp_path, [SD_2, RSD_C, Tree("rsd_c", (3, 1))])
    todo = mine.todo()
    assert [(round_, job.side.name, len(job.cells)) for round_, job in todo] == [
        (0, "plain", 2),
        (0, "sd", 2),
        (0, "rsd_c", 4),
        (1, "plain", 2),
    ]
    spec = todo[2][1].side.engine["speculative_config"]
    scheduled = [entry["branching_factors"] for entry in spec["schedule"]]
    assert [cell.tree for cell in todo[2][1].cells[::2]] == [
        {"branching_factors": [2, 2]},
        {"branching_factors": [3, 1]},
    ]
    assert [2, 2] in scheduled
    assert [3, 1] in scheduled
    assert parse_spec_config(spec).proposer().sizes.max_nodes == 1 + 62


def test_finished_answers_are_scored_once(tmp_path: Path) -> None:
    """Red when answers stay without scores, or get them twice."""
    mine = finished_plan(tmp_path)
    rescoring = experiment.scoring(mine, mine.finished())
    [(_, job)] = rescoring.todo()
    assert len(job.cells) == 2 * 2 + 2 * 4
    assert all(Path(cell.options["file"]).is_file() for cell in job.cells)
    score(mine)
    assert not experiment.scoring(mine, mine.finished()).todo()


def finished_plan(out: Path) -> Plan:
    """Make a plan whose cells are all stored; RSD-S emits most and is slowest."""
    mine = plan(out, [SD_2, RSD_C, Tree("rsd_c", (3, 1)), RSD_S])
    for engine in mine.engines:
        for cell in engine.cells:
            slow = engine.side.name == "rsd_s"
            finish(mine, engine, cell, 4.0 if slow else 2.0, 4 if slow else 3)
    return mine


def evidence(mine: Plan) -> report.Content:
    """What is written about a plan."""
    finished = mine.finished()
    origin = report.header({"commit": "abc"}, {"spectr": "no luck"}, finished)
    parts = ["lengths", "budgets"]
    return origin | experiment.evidence(mine, parts, 0.1, finished)


def score(mine: Plan) -> None:
    """Store scores of all answers, lower the warmer they are."""
    store_scores(experiment.scoring(mine, mine.finished()), mine)


def test_rows_are_relative_to_plain_and_the_best_tree_is_found(tmp_path: Path) -> None:
    """Red when a metric is not normalised, or another than the best tree is shown."""
    mine = finished_plan(tmp_path)
    cells, _ = split_scores(mine, mine.finished())
    rows = rows_of(cells, size_ratio=0.1)
    plain, *_, last = rows
    relative = ("block_efficiency", "mbsu", "token_rate_ratio")
    assert [plain[name] for name in relative] == [1, 1, 1]
    assert last["name"] == "rsd_s-3x2"
    assert last["block_efficiency"] == pytest.approx(2.0)
    assert last["mbsu"] == pytest.approx(2.0 / 1.2)
    assert last["token_rate_ratio"] == pytest.approx(0.5)
    [other] = [r for r in rows if r["name"] == "rsd_c-3.1" and r["temperature"] == 1]
    other["token_rate_ratio"] = 3.0
    best = best_of(rows, "budgets")
    keys = ("temperature", "method", "size", "metric")
    found = {tuple(p[key] for key in keys): p["tree"] for p in best}
    assert found[1.0, "rsd_c", 6, "token_rate_ratio"] == "rsd_c-3.1"
    assert (1.0, "sd", 6, "mbsu") not in found


def test_law_is_compared_per_method_with_plain(tmp_path: Path) -> None:
    """Red when methods are not pooled over trees, or the control is forgotten."""
    mine = finished_plan(tmp_path)
    score(mine)
    found = comparisons(*split_scores(mine, mine.finished()))
    assert [(c["first"], c["num_answers"]) for c in found if not c["control"]] == [
        ("rsd_c, temperature 0.3", [4, 4]),
        ("rsd_c, temperature 1", [4, 4]),
    ]
    assert found[-1]["control"]
    assert found[-1]["difference"]["interval"]["mean"] == pytest.approx(0.7)
    assert smallest_p_value(found) == 1.0


@pytest.mark.thorough
def test_reports_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Red when a table, plot or the provenance is left out of the results, or cannot
    be made again from results.json."""
    mine = finished_plan(tmp_path)
    score(mine)
    report.write_json(tmp_path, evidence(mine))
    content = report.read_json(tmp_path)
    with monkeypatch.context() as without_plots:
        without_pictures(without_plots)
        experiment.render(content, tmp_path)
    text = (tmp_path / "results.md").read_text()
    assert "| rsd_s-3x2 | 1 | 2 | 6 | 6 | 2.000 ± 0.000 | 1.667 |" in text
    assert "| rsd_c, temperature 1; plain, temperature 1 | 4 4 |" in text
    assert "- spectr: no luck" in text
    assert "- commit: abc" in text
    assert content["runs"][0]["result"]["token_ids"] == [[1, 2, 3], [1, 2, 4]]
    (tmp_path / "results.md").unlink()
    experiment.render(content, tmp_path)
    assert (tmp_path / "results.md").read_text() == text
    assert (tmp_path / "lengths.png").stat().st_size > 0
    assert (tmp_path / "budgets.png").stat().st_size > 0


def test_rules_are_ordered_and_recursive_rejection_always_accepts() -> None:
    """Red when a rule's acceptance rate is wrong on two tokens."""
    rates = [np.array(rule) for rule in toy.compute(grid=5)["rates"].values()]
    for lower, higher in itertools.pairwise(rates):
        assert (lower <= higher + 1e-9).all()
    assert rates[-1] == pytest.approx(1.0)
    # by hand: one draw is token 1 with 3/4, and 9/10 of the target lies there
    assert toy.rate("optimal_transport", 0.5, 0.9) == pytest.approx(0.85)


@pytest.mark.thorough
def test_toy_is_written(tmp_path: Path) -> None:
    """Red when the figure or its table is left out."""
    small = toy.compute(grid=3)
    toy.write(small, tmp_path)
    assert json.loads((tmp_path / "toy.json").read_text()) == small
    assert "| 0.5 | 0.9 | 0.8000 |" in (tmp_path / "toy.md").read_text()
    assert (tmp_path / "toy.png").stat().st_size > 0


def cli(*arguments: str) -> tuple[int, str]:
    """Run the command with the shipped draft model in both places."""
    models = ["--target", shipped_drafter(), "--draft", shipped_drafter()]
    done = CliRunner().invoke(app, ["rsd", *models, *arguments])
    return done.exit_code, done.output


def test_dry_run_starts_and_writes_nothing(tmp_path: Path) -> None:
    """Red when --dry-run starts engines or touches the output folder."""
    code, output = cli("--dry-run", "--out", str(tmp_path / "out"))
    assert code == 0
    assert "142 cells to measure in 12 engines" in output
    assert not (tmp_path / "out").exists()


def test_no_trees_no_engines() -> None:
    """Red when the toy alone starts an engine."""
    code, output = cli("--dry-run", "--parts", "toy")
    assert code == 0, output
    assert "engines" not in output
