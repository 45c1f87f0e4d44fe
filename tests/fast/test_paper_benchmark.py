"""The paper's experiments: trees, metrics, tests of the law, resuming. No engine."""

import dataclasses
import itertools
import json
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from benchmarks import tasks
from benchmarks.paper import __main__ as command
from benchmarks.paper import experiments, references, toy
from benchmarks.paper.experiments import Plan, Run, StoredRun, Task
from benchmarks.paper.law import comparisons, samples_of, smallest_p_value
from benchmarks.paper.metrics import (
    best_of,
    mbsu,
    num_parameters,
    rows_of,
    standard_error,
)
from benchmarks.paper.trees import LENGTH_TREES, METHODS, Tree, trees_of
from benchmarks.tasks import Scores, store
from vllm_treespec.config import parse_spec_config
from vllm_treespec.proposers import PROPOSERS
from vllm_treespec.tools.launch import EngineError
from vllm_treespec.tools.sides import Acceptance, Cell, CellResult, shipped_drafter

SD_2 = Tree("sd", (2,))
RSD_S = Tree("rsd_s", (3, 2))
RSD_C = Tree("rsd_c", (2, 2))


def all_trees() -> list[Tree]:
    """Every tree of both experiments."""
    return command.all_trees(["lengths", "budgets"])


@pytest.mark.parametrize("tree", all_trees(), ids=lambda tree: tree.name)
def test_size_of_a_tree_is_what_its_proposer_draws(tree: Tree) -> None:
    """Red when a method's keys or the size of its trees change."""
    max_nodes = PROPOSERS[tree.method](**tree.shape).sizes.max_nodes
    assert max_nodes - 1 == tree.num_drafts


@pytest.mark.parametrize("method", METHODS)
def test_spec_config_of_a_tree_is_valid(method: str) -> None:
    """Red when a spec-config's keys are renamed."""
    for tree in all_trees():
        if tree.method == method:
            spec = parse_spec_config(tree.spec_config("draft"))
            assert spec.proposer().sizes.max_nodes - 1 == tree.num_drafts


@pytest.mark.parametrize("length", LENGTH_TREES)
def test_trees_of_a_length_are_no_larger_than_the_binary_tree(length: int) -> None:
    """Red when a tree of D.3.1 is mistyped: depth, or larger than RSD-C with twos."""
    trees = trees_of("lengths")[length]
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
@pytest.mark.parametrize(
    ("block_efficiency", "depth", "published"),
    [(2.166, 2, 2.093), (2.970, 3, 2.823), (3.535, 4, 3.306), (3.492, 5, 3.213)],
)
def test_mbsu_gives_the_published_values(
    block_efficiency: float, depth: int, published: float
) -> None:
    """Red when the ratio of sizes is turned round, as the appendix's text has it."""
    ratio = 0.117 / 6.74
    assert mbsu(block_efficiency, depth, ratio) == pytest.approx(published, abs=2e-3)


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


def plan(out: Path, trees: list[Tree], models: str = "weights") -> Plan:
    """Make a plan with two prompts."""
    return Plan(
        trees=trees,
        temperatures=[0.3, 1.0],
        rounds=1,
        plain_rounds=2,
        prompts=["hello", "good morning"],
        target="target",
        draft="draft",
        max_tokens=4,
        batch_size=1,
        out=out,
        models=models,
        commit="abc",
    )


def finish(mine: Plan, run: Run, seconds: float = 1.0, emitted: int = 3) -> None:
    """Store a run of two answers of three tokens, and its scores."""
    drafted = Acceptance(trees=2, nodes=6, at_least=[emitted - 2])
    result = CellResult(
        cell=Cell(batch_size=1, temperature=run.temperature),
        seconds=seconds,
        num_tokens=[3, 3],
        tpot_ms=[None, None],
        token_ids=[[1, 2, 3], [1, 2, 4]],
        acceptance=drafted if run.tree else None,
    )
    stored = StoredRun(
        run=run, settings=mine.settings, commit="abc", seed=1, result=result
    )
    store(mine.file(run), stored)
    scores = Scores(mean_logprobs=[-1.0 - run.temperature, -2.0 - run.temperature])
    store(mine.scores_file(run), scores)


def test_one_engine_runs_all_trees_of_a_method(tmp_path: Path) -> None:
    """Red when a method needs more than one engine, or one too small for its trees."""
    mine = plan(tmp_path, [SD_2, RSD_C, Tree("rsd_c", (3, 1))])
    engines = mine.todo()
    assert [(e[0].method, len(e)) for e in engines] == [
        ("plain", 4),
        ("sd", 2),
        ("rsd_c", 4),
    ]
    spec = mine.side(engines[2]).engine["speculative_config"]
    assert [entry["branching_factors"] for entry in spec["schedule"]] == [
        [2, 2],
        [3, 1],
    ]
    assert parse_spec_config(spec).proposer().sizes.max_nodes == 1 + 6


def test_finished_trees_are_skipped_and_draw_other_numbers(tmp_path: Path) -> None:
    """Red when a broken-off run starts over, or repeats its random numbers."""
    mine = plan(tmp_path, [SD_2])
    first = mine.task(mine.todo()[0])
    finish(mine, first.runs[0])
    (mine.out / "runs" / "sd-2.t1.0.partial").write_text("cut off")
    later = mine.task(mine.todo()[0])
    assert later.runs == first.runs[1:]
    assert later.job.seed != first.job.seed
    assert not mine.unscored()


def test_results_of_other_weights_are_refused(tmp_path: Path) -> None:
    """Red when results of different models can be mixed in one folder."""
    mine = plan(tmp_path, [SD_2])
    finish(mine, mine.runs()[0])
    assert len(experiments.finished_runs(mine)) == 1
    with pytest.raises(ValueError, match="another --out"):
        experiments.finished_runs(plan(tmp_path, [SD_2], models="others"))


def test_an_engine_that_fails_does_not_stop_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Red when one failing method ends the whole command."""
    mine = plan(tmp_path, [SD_2, RSD_S])
    done: list[str] = []

    def run_task(task: Task, module: str) -> None:
        name = task.job.side.name
        if name == "sd":
            raise EngineError("sd: no luck")
        done.append(name)

    monkeypatch.setattr(tasks, "run_task", run_task)
    failed = experiments.execute(mine)
    assert done == ["plain", "rsd_s"]
    assert failed == {"sd": "sd: no luck"}


def finished_plan(out: Path) -> Plan:
    """Make a plan whose runs are all stored; RSD-S emits most and is slowest."""
    mine = plan(out, [SD_2, RSD_C, Tree("rsd_c", (3, 1)), RSD_S])
    for run in mine.runs():
        slow = run.tree == RSD_S
        finish(mine, run, seconds=4.0 if slow else 2.0, emitted=4 if slow else 3)
    return mine


def test_rows_are_relative_to_plain_and_the_best_tree_is_found(tmp_path: Path) -> None:
    """Red when a metric is not normalised, or another than the best tree is shown."""
    mine = finished_plan(tmp_path)
    rows = rows_of(experiments.finished_runs(mine), size_ratio=0.1)
    plain, *_, last = rows
    assert (plain.block_efficiency, plain.mbsu, plain.token_rate_ratio) == (1, 1, 1)
    assert last.name == "rsd_s-3x2"
    assert last.block_efficiency == pytest.approx(2.0)
    assert last.mbsu == pytest.approx(2.0 / 1.2)
    assert last.token_rate_ratio == pytest.approx(0.5)
    [other] = [r for r in rows if r.name == "rsd_c-3.1" and r.temperature == 1]
    other.token_rate_ratio = 3.0
    best = best_of(rows, "budgets", trees_of("budgets"))
    found = {(p.temperature, p.method, p.size, p.metric): p.tree for p in best}
    assert found[1.0, "rsd_c", 6, "token_rate_ratio"] == "rsd_c-3.1"
    assert (1.0, "sd", 6, "mbsu") not in found


def test_law_is_compared_per_method_with_plain(tmp_path: Path) -> None:
    """Red when methods are not pooled over trees, or the control is forgotten."""
    mine = finished_plan(tmp_path)
    runs = experiments.finished_runs(mine)
    found = comparisons(samples_of(runs, experiments.finished_scores(mine)))
    assert [(c.first, c.num_answers) for c in found if not c.control] == [
        ("rsd_c, temperature 0.3", (4, 4)),
        ("rsd_c, temperature 1", (4, 4)),
    ]
    assert found[-1].control
    assert found[-1].difference.interval.mean == pytest.approx(0.7)
    assert smallest_p_value(found) == 1.0


def test_reports_are_written(tmp_path: Path) -> None:
    """Red when a table, plot or the provenance is left out of the results."""
    mine = finished_plan(tmp_path)
    parts = ["lengths", "budgets"]
    origin = {"commit": "abc"}
    command.write_reports(mine, parts, origin, 0.1, [], {"spectr": "no luck"})
    text = (tmp_path / "results.md").read_text()
    assert "| rsd_s-3x2 | 1 | 2 | 6 | 6 | 2.000 ± 0.000 | 1.667 |" in text
    assert "- spectr: no luck" in text
    assert "- commit: abc" in text
    content = json.loads((tmp_path / "results.json").read_text())
    assert content["runs"][0]["result"]["token_ids"] == [[1, 2, 3], [1, 2, 4]]
    assert (tmp_path / "lengths.png").stat().st_size > 0
    assert (tmp_path / "budgets.png").stat().st_size > 0


def test_rules_are_ordered_and_recursive_rejection_always_accepts() -> None:
    """Red when a rule's acceptance rate is wrong on two tokens."""
    rates = [np.array(rule) for rule in toy.compute(grid=5).rates.values()]
    for lower, higher in itertools.pairwise(rates):
        assert (lower <= higher + 1e-9).all()
    assert rates[-1] == pytest.approx(1.0)
    # by hand: one draw is token 1 with 3/4, and 9/10 of the target lies there
    assert toy.rate("optimal_transport", 0.5, 0.9) == pytest.approx(0.85)


def test_toy_is_written(tmp_path: Path) -> None:
    """Red when the figure or its table is left out."""
    small = toy.compute(grid=3)
    toy.write(small, tmp_path)
    assert json.loads((tmp_path / "toy.json").read_text())["rates"] == small.rates
    assert "| 0.5 | 0.9 | 0.8000 |" in (tmp_path / "toy.md").read_text()
    assert (tmp_path / "toy.png").stat().st_size > 0


def test_references_are_read_or_refused_by_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Red when prompts and references can fall out of step."""
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "a", "r": "x"}\n\n{"prompt": "b", "r": "y"}\n')
    assert references.load_references(path, "r") == ["x", "y"]
    with pytest.raises(ValueError, match="line 1 holds no text under 'q'"):
        references.load_references(path, "q")
    assert references.repeated(["x", "y"], 4) == ["x", "y", "x", "y"]
    monkeypatch.setattr(references, "NEEDED", {"no_such_module": "no-such-module"})
    with pytest.raises(ValueError, match="pip install"):
        references.check_packages()


def cli(*arguments: str) -> tuple[int, str]:
    """Run the command with the shipped draft model in both places."""
    app = command.typer.Typer()
    app.command()(command.paper)
    models = ["--target", shipped_drafter(), "--draft", shipped_drafter()]
    done = CliRunner().invoke(app, [*models, *arguments])
    return done.exit_code, done.output


def test_dry_run_starts_and_writes_nothing(tmp_path: Path) -> None:
    """Red when --dry-run starts engines or touches the output folder."""
    code, output = cli("--dry-run", "--out", str(tmp_path / "out"))
    assert code == 0
    assert "142 runs to do in 5 engines" in output
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--parts", "toy,length"], "there is no 'length'"),
        (["--sides", "rsd_x"], "there is no tree 'rsd_x'"),
        (["--temperatures", "0.3;1"], "no list of numbers"),
        (["--draft", "no/such/folder"], "holds no *.safetensors"),
    ],
)
def test_wrong_options_are_refused_in_one_line(
    arguments: list[str], message: str
) -> None:
    """Red when an option's mistake ends in a traceback or a long run."""
    code, output = cli("--dry-run", *arguments)
    assert code == 1
    assert message in output


def test_no_trees_no_runs(tmp_path: Path) -> None:
    """Red when the toy alone starts an engine."""
    assert dataclasses.replace(plan(tmp_path, [SD_2]), trees=[]).runs() == []
