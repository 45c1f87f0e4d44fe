"""The ReDrafter paper's evidence: runs, numbers, resuming, reports. No engine."""

import dataclasses
import json
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from benchmarks import tasks
from benchmarks.redrafter import __main__ as command
from benchmarks.redrafter import experiments
from benchmarks.redrafter.chains import (
    FILLER_TOKEN,
    Chains,
    shared_nodes,
    use_chains,
    without_sharing,
)
from benchmarks.redrafter.experiments import Plan, StoredRun, Task
from benchmarks.redrafter.parts import (
    PARTS,
    SIDES,
    TABLE2_TEMPERATURES,
    Beams,
    Run,
    Sizes,
    distinct,
)
from benchmarks.redrafter.rows import (
    Evidence,
    compression_of,
    percentile,
    stretches_of,
)
from benchmarks.tasks import Scores, store
from vllm_treespec.config import parse_spec_config
from vllm_treespec.core.stats import StepStats
from vllm_treespec.core.tree import TreeBatch, ancestor_mask, preorder
from vllm_treespec.core.tree_builders import from_parents
from vllm_treespec.heads import (
    MedusaHeadConfig,
    ReDrafterHeadConfig,
    build_head,
    save_head,
)
from vllm_treespec.proposers import Proposer
from vllm_treespec.proposers.redrafter import ReDrafter
from vllm_treespec.tools.launch import EngineError
from vllm_treespec.tools.sides import Acceptance, Cell, CellResult

BEAMS = Beams(beam_width=4, length=4, num_drafts=15)


def head_folders(folder: Path) -> dict[str, str]:
    """Make tiny untrained heads."""
    configs: list[MedusaHeadConfig | ReDrafterHeadConfig] = [
        ReDrafterHeadConfig(hidden_size=4, vocab_size=16, num_hot_tokens=8),
        MedusaHeadConfig(
            hidden_size=4, vocab_size=16, depth=5, rank_accuracies=((0.5, 0.1),) * 5
        ),
    ]
    for config in configs:
        save_head(build_head(config), folder / config.method)
    return {config.method: str(folder / config.method) for config in configs}


@pytest.fixture(scope="module")
def heads(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Folders of tiny heads, by method."""
    return head_folders(tmp_path_factory.mktemp("heads"))


def plan(out: Path, heads: dict[str, str], parts: tuple[str, ...] = PARTS) -> Plan:
    """Make a plan with two prompts and short answers."""
    return Plan(
        entries=Sizes(BEAMS, max_tokens=8).entries(parts),
        rounds=1,
        prompts=["hello", "good morning"],
        target="target",
        heads=heads,
        eager=True,
        out=out,
        models={name: {"sha256": name} for name in ("target", "redrafter", "medusa")},
        commit="abc",
    )


def finish(mine: Plan, run: Run, round_: int = 0, seconds: float = 1.0) -> None:
    """Store a run of two answers of 8 tokens, and its scores."""
    drafted = Acceptance(trees=4, nodes=24, at_least=[3, 1])
    result = CellResult(
        cell=Cell(batch_size=run.batch_size, temperature=run.temperature),
        seconds=seconds,
        num_tokens=[8, 8],
        tpot_ms=[1.0, 1.0],
        token_ids=[[1] * 8, [2] * 8],
        acceptance=drafted if run.tree else None,
    )
    stored = StoredRun(
        run=run,
        round=round_,
        settings=mine.settings(run.side),
        commit="abc",
        seed=1,
        result=result,
        node_counts={5: 1, 7: 3} if run.tree else {},
        step_tokens=[[1, 2, 3, 2], [1, 4, 3]] if run.traced else [],
    )
    store(mine.file(run, round_), stored)
    if run in mine.scored:
        means = [-1.0 - run.temperature, -2.0 - run.temperature]
        store(mine.scores_file(run, round_), Scores(mean_logprobs=means))


def finished_plan(out: Path, heads: dict[str, str]) -> Plan:
    """Make a plan whose runs are all stored; ours take half as long as plain."""
    mine = plan(out, heads)
    for run in mine.runs:
        finish(mine, run, seconds=1.0 if run.tree else 2.0)
    return mine


def evidence(mine: Plan) -> Evidence:
    """Read what is stored."""
    runs = experiments.finished_runs(mine)
    return Evidence(runs, experiments.finished_scores(mine, runs))


def test_every_side_has_one_valid_engine_for_all_its_trees(
    tmp_path: Path, heads: dict[str, str]
) -> None:
    """Red when a side needs two engines, or the spec-config's keys change."""
    mine = plan(tmp_path, heads)
    tasks = mine.todo()
    assert [runs[0].side for _, runs in tasks] == list(SIDES)
    for _, runs in tasks[1:]:
        side = mine.side(runs[0].side)
        config = parse_spec_config(side.engine["speculative_config"])
        trees = [tree.config for tree in config.scheduled()]
        for run in runs:
            assert run.tree is not None
            assert any(tree == tree.with_shape(run.tree) for tree in trees), run.name


def test_runs_of_several_parts_are_run_once(
    tmp_path: Path, heads: dict[str, str]
) -> None:
    """Red when a run gets two names, or two runs one name."""
    mine = plan(tmp_path, heads)
    names = [run.name for run in mine.runs]
    assert len(set(names)) == len(names) == 54
    assert len(mine.entries) == 58
    assert not [run for run in mine.scored if run.traced or run.batch_size > 1]


def test_table_2_compares_all_sides_at_all_temperatures() -> None:
    """Red when a way of acceptance or a temperature is dropped."""
    rows = Sizes(BEAMS, 8).entries(["table2"])
    found = {(e.run.side, e.run.temperature) for e in rows if e.run.temperature}
    assert len(found) == 4 * len(TABLE2_TEMPERATURES)


def test_finished_runs_are_skipped_and_other_heads_refused(
    tmp_path: Path, heads: dict[str, str]
) -> None:
    """Red when a cut run starts over, or results of other weights are mixed in."""
    mine = plan(tmp_path, heads, ("figure5",))
    [(_, runs)] = mine.todo()
    first = mine.task(0, runs)
    finish(mine, runs[0])
    [(_, left)] = mine.todo()
    assert left == runs[1:]
    later = mine.task(0, left)
    assert later.job.seed != first.job.seed
    assert later.job.side == first.job.side
    others = {**mine.models, "redrafter": {"sha256": "other"}}
    with pytest.raises(ValueError, match="another --out"):
        experiments.finished_runs(dataclasses.replace(mine, models=others))
    no_matter = {**mine.models, "medusa": {"sha256": "other"}}
    kept = experiments.finished_runs(dataclasses.replace(mine, models=no_matter))
    assert len(kept) == 1


def test_only_answers_of_the_tables_are_scored(
    tmp_path: Path, heads: dict[str, str]
) -> None:
    """Red when figures are scored, too, or scores are computed twice."""
    mine = finished_plan(tmp_path, heads)
    assert not mine.unscored()
    mine.scores_file(mine.scored[0], 0).unlink()
    task = mine.rescoring()
    assert (task.runs, task.rounds, task.rescore) == (mine.scored[:1], [0], True)


def test_a_side_that_fails_does_not_stop_the_others(
    tmp_path: Path, heads: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Red when one failing engine ends the command, or is tried in every round."""
    mine = dataclasses.replace(plan(tmp_path, heads), rounds=2)
    started: list[str] = []

    def run_task(task: Task, module: str) -> None:
        started.append(task.job.side.name)
        if task.job.side.name == "medusa":
            raise EngineError("medusa: no luck")

    monkeypatch.setattr(tasks, "run_task", run_task)
    failed = experiments.execute(mine, after_task=lambda failed: None)
    assert failed == {"medusa": "medusa: no luck"}
    assert started == [*SIDES, *(side for side in SIDES if side != "medusa")]


def test_speed_ups_are_medians_of_ratios_within_a_round(
    tmp_path: Path, heads: dict[str, str]
) -> None:
    """Red when speeds of different rounds are compared, or another plain run."""
    parts = ("table1",)
    mine = dataclasses.replace(plan(tmp_path, heads, parts), rounds=3)
    for run in mine.runs:
        for round_, load in enumerate((1.0, 3.0, 10.0)):
            fast = 2.0 if run.tree else 1.0
            finish(mine, run, round_, seconds=load / fast * (1 + run.temperature))
    rows = {row.label: row for row in evidence(mine).rows(mine.entries)}
    typical = rows["ReDrafter, typical (lossy)"]
    assert typical.rounds == 3
    assert typical.speedup == pytest.approx(2.0)
    assert typical.speedup_over_greedy == pytest.approx(2.0 / 1.7)
    assert rows["plain, greedy"].speedup == 1
    assert typical.tokens_per_step is not None
    assert typical.tokens_per_step.mean == pytest.approx(2.0)
    assert typical.mean_drafts == pytest.approx(5.0)


def test_quality_is_per_prompt_and_against_greedy_plain(
    tmp_path: Path, heads: dict[str, str]
) -> None:
    """Red when the errors are not over prompts, or the gain is not paired."""
    mine = finished_plan(tmp_path, heads)
    rows = evidence(mine).rows(mine.entries)
    [row] = [r for r in rows if (r.label, r.temperature) == ("rejection", 0.3)]
    assert row.quality is not None
    assert row.quality.mean == pytest.approx(-1.8)
    assert row.quality.error == pytest.approx(0.5)
    assert row.quality_gain is not None
    assert row.quality_gain.mean == pytest.approx(-0.3)
    assert row.quality_gain.error == pytest.approx(0.0, abs=1e-9)
    assert not [r for r in rows if r.part == "figure6" and r.quality]


def test_stretches_leave_out_the_prompt_and_the_cut_end() -> None:
    """Red when a step counts in another stretch than the one it begins in."""
    [run, *_] = distinct(Sizes(BEAMS, max_tokens=4).entries(["figure5"]))
    assert run.max_tokens == 8
    found = stretches_of(run, [[1, 2, 3, 2], [1, 4, 3]])
    # steps begin after 1 and 3 tokens, and after 1; stretches are of two tokens
    assert [(s.first, s.last, s.num_steps) for s in found] == [(1, 2, 2), (3, 4, 1)]
    assert [s.tokens_per_step.mean for s in found] == [3.0, 3.0]
    assert found[0].tokens_per_step.error == pytest.approx(1.0)


def test_compression_holds_mean_and_percentiles() -> None:
    """Red when roots are counted, or a percentile is not of the trees."""
    run = Run(side="redrafter", tree={"beam_width": 4, "length": 5}, max_tokens=8)
    values = np.random.default_rng(0).integers(5, 20, size=500)
    counts = Counter(values.tolist())
    found = compression_of(run, counts)
    assert (found.num_candidates, found.num_trees) == (20, 500)
    assert found.mean == pytest.approx(values.mean())
    low, high = np.percentile(values, [1, 99], method="inverted_cdf")
    assert (found.low, found.high) == (low, high)
    assert percentile(Counter({7: 1}), 0.5) == 7


def test_workers_count_trees_by_their_nodes() -> None:
    """Red when figure 5b has nothing to be made of."""
    stats = StepStats()
    stats.observe([5, 7], [0, 2])
    stats.observe([7], [1])
    assert stats.as_dict()["node_counts"] == {5: 1, 7: 2}
    stats.reset()
    assert stats.as_dict()["node_counts"] == {}


# Beams 1 2 3, 1 2 4 and 5 6 7; and 1 2 3, 4 5 6, 7 8 9, which share nothing.
SHARED = ([9, 1, 5, 2, 6, 3, 4, 7], [-1, 0, 0, 1, 2, 3, 3, 4])
APART = ([9, 1, 4, 7, 2, 5, 8, 3, 6, 9], [-1, 0, 0, 0, 1, 2, 3, 4, 5, 6])


def beams_as_chains() -> tuple[TreeBatch, TreeBatch]:
    """Trees of three beams of three tokens, and what chains make of them."""
    tree = from_parents([SHARED[0], APART[0]], [SHARED[1], APART[1]])
    return tree, without_sharing(tree)


def test_chains_have_all_rows_of_every_beam() -> None:
    """Red when the emulated cost is not that of beams verified one by one."""
    tree, chains = beams_as_chains()
    assert shared_nodes(tree).sum(1).tolist() == [2, 0]
    assert chains.num_nodes.tolist() == [10, 10]
    rank = preorder(chains, ancestor_mask(chains))
    for row in range(2):
        depths = chains.depths[row][rank[row].argsort()].tolist()
        parents = chains.parents[row].tolist()
        leaves = [i for i in range(10) if i not in parents]
        ends = sorted(rank[row, leaf].item() for leaf in leaves)
        assert ends == [3, 6, 9], depths


def test_chains_keep_the_tree_and_add_only_below_its_leaves() -> None:
    """Red when acceptance without tree attention is not that with it."""
    tree, chains = beams_as_chains()
    is_node = tree.is_node()
    width = tree.max_nodes
    for name in ("token_ids", "parents", "depths"):
        ours, theirs = getattr(chains, name), getattr(tree, name)
        assert torch.equal(ours[:, :width][is_node], theirs[is_node])
    assert chains.token_ids[0, 8:].tolist() == [FILLER_TOKEN] * 2
    # both below the second beam, which shares two tokens with the first
    assert chains.parents[0, 8:].tolist() == [6, 8]
    assert chains.depths[0, 8:].tolist() == [4, 5]


def test_a_worker_goes_from_tree_to_chains_and_back() -> None:
    """Red when a worker's proposers or a beam's sizes are kept elsewhere."""
    beams = ReDrafter(beam_width=2, length=4, num_drafts=8)
    proposers: list[Proposer | None] = [None, beams]
    schedule = SimpleNamespace(always=1)
    method = SimpleNamespace(schedule=schedule, proposers=proposers)
    decoder = SimpleNamespace(method=method)
    worker = SimpleNamespace(model_runner=SimpleNamespace(decoder=decoder))
    use_chains(worker, True)
    chains = method.proposers[1]
    assert isinstance(chains, Chains)
    sizes = chains.sizes
    assert (sizes.max_nodes, sizes.max_depth, sizes.max_leaves) == (9, 7, 2)
    use_chains(worker, False)
    use_chains(worker, False)
    assert method.proposers == [None, beams]


def test_reports_hold_all_parts(tmp_path: Path, heads: dict[str, str]) -> None:
    """Red when a table, a picture or the provenance is left out of the results."""
    mine = finished_plan(tmp_path, heads)
    origin = {"commit": "abc"}
    command.write_reports(mine, origin, {"medusa-typical": "no luck"})
    text = (tmp_path / "results.md").read_text()
    assert "| ReDrafter, greedy | 0.00 M | 0 | 16.0 | 2.00 ± 0.35 | 2.00× |" in text
    assert "| 12 × 5 | 60 | 5.5 | 4 | 6 | 10.91 | 4 |" in text
    assert "| ReDrafter, 8 beams, no tree attention | 16 | 1.0 | 16.0 |" in text
    assert "- medusa-typical: no luck" in text
    assert "- commit: abc" in text
    content = json.loads((tmp_path / "results.json").read_text())
    assert {row["part"] for row in content["rows"]} == {"table1", "table2", "figure6"}
    for name in PARTS:
        assert (tmp_path / f"{name}.png").stat().st_size > 0


def test_reports_are_written_of_what_is_finished(
    tmp_path: Path, heads: dict[str, str]
) -> None:
    """Red when a cut run leaves no results, as while plain decoding is missing."""
    mine = plan(tmp_path, heads)
    [run] = [r for r in mine.runs if r.side == "redrafter-typical"][:1]
    finish(mine, run)
    command.write_reports(mine, {}, {})
    assert "ReDrafter, typical (lossy)" in (tmp_path / "results.md").read_text()
    assert (tmp_path / "table1.png").stat().st_size > 0


def cli(heads: dict[str, str], *arguments: str) -> tuple[int, str]:
    """Run the command with tiny heads."""
    app = command.typer.Typer()
    app.command()(command.redrafter)
    models = [f"--{method}={folder}" for method, folder in heads.items()]
    target = ["--target", heads["redrafter"]]
    done = CliRunner().invoke(app, [*target, *models, *arguments])
    return done.exit_code, done.output


def test_dry_run_starts_and_writes_nothing(
    tmp_path: Path, heads: dict[str, str]
) -> None:
    """Red when --dry-run starts engines or touches the output folder."""
    code, output = cli(heads, "--dry-run", "--out", str(tmp_path / "out"))
    assert code == 0, output
    assert "54 runs to do in 6 engines" in output
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--only", "table1,table3"], "there is no 'table3'"),
        (["--tree", "4x4"], "beam width x length x draft tokens"),
        (["--medusa", "no/such/folder"], "holds no config.json"),
    ],
)
def test_wrong_options_are_refused_in_one_line(
    heads: dict[str, str], arguments: list[str], message: str
) -> None:
    """Red when an option's mistake ends in a traceback or a long run."""
    code, output = cli(heads, "--dry-run", *arguments)
    assert code == 1
    assert message in output


def test_a_head_of_the_wrong_kind_is_refused(
    heads: dict[str, str], tmp_path: Path
) -> None:
    """Red when heads can be mixed up; only heads that are needed are looked at."""
    mixed = {**heads, "medusa": heads["redrafter"]}
    code, output = cli(mixed, "--dry-run")
    assert code == 1
    assert "holds a redrafter head" in output
    out = str(tmp_path / "out")
    assert cli(mixed, "--dry-run", "--only", "figure5", "--out", out)[0] == 0
