"""The ReDrafter paper's evidence: runs, numbers, resuming, reports. No engine."""

from collections import Counter
from collections.abc import Generator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm.outputs import RequestOutput

from benchmarks.harness import report
from benchmarks.harness.plan import Engine, Plan, base_job, execute, make_plan
from benchmarks.harness.rescoring import split_scores
from benchmarks.redrafter.chains import (
    FILLER_TOKEN,
    Chains,
    shared_nodes,
    use_chains,
    without_sharing,
)
from benchmarks.redrafter.engine import chains as measure_chains
from benchmarks.redrafter.engine import traced
from benchmarks.redrafter.experiment import engines_of, evidence, scoring
from benchmarks.redrafter.parts import (
    PARTS,
    SIDES,
    TABLE2_TEMPERATURES,
    TRACED,
    Beams,
    Sizes,
)
from benchmarks.redrafter.report import render
from benchmarks.redrafter.rows import Evidence, compression_of, stretches_of
from tests.fast.stored_cells import keep, measured, store_scores, without_pictures
from vllm_treespec.batch.stats import StepStats
from vllm_treespec.config import parse_spec_config
from vllm_treespec.heads import (
    MedusaHeadConfig,
    ReDrafterHeadConfig,
    build_head,
    save_head,
)
from vllm_treespec.layouts.branch_plan import depth_first
from vllm_treespec.proposers import Proposer
from vllm_treespec.proposers.redrafter import ReDrafter
from vllm_treespec.tools.launch import EngineError, Event
from vllm_treespec.tools.sides import Acceptance, Cell, CellResult, Job
from vllm_treespec.trees.builders import from_parents
from vllm_treespec.trees.tree import TreeBatch

SIZES = Sizes(Beams(beam_width=4, length=4, num_drafts=15), 8, num_prompts=2)
WEIGHTS = {name: {"sha256": name} for name in ("target", "redrafter", "medusa")}


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


def plan(
    out: Path,
    heads: dict[str, str],
    parts: tuple[str, ...] = PARTS,
    rounds: int = 1,
    **deciding: object,
) -> Plan:
    """Make a plan with two prompts and short answers."""
    entries = SIZES.entries(parts)
    engines = engines_of(SIZES, entries, heads, eager=True, rounds=rounds)
    job = base_job("target", ["hello", "good morning"], max_tokens=2)
    return make_plan(job, engines, out, {**WEIGHTS, **deciding})


def finish(
    mine: Plan, engine: Engine, cell: Cell, round_: int = 0, seconds: float = 1.0
) -> None:
    """Store a cell of two answers of 8 tokens."""
    drafted = Acceptance(trees=4, nodes=24, at_least=[3, 1])
    steps = {"step_tokens": [[1, 2, 3, 2], [1, 4, 3]], "node_counts": {5: 1, 7: 3}}
    result = measured(
        cell,
        seconds,
        num_tokens=[8, 8],
        tpot_ms=[1.0, 1.0],
        token_ids=[[1] * 8, [2] * 8],
        acceptance=drafted if cell.tree else None,
        details=steps if cell.measure == TRACED else {},
    )
    keep(mine, engine.side, result, round_)


def score(mine: Plan) -> None:
    """Store scores of the tables' answers, lower the warmer they are."""
    store_scores(scoring(mine, SIZES.entries(), mine.finished()), mine)


def finished_plan(out: Path, heads: dict[str, str]) -> Plan:
    """Make a plan whose cells are all stored; ours take half as long as plain."""
    mine = plan(out, heads)
    for engine in mine.engines:
        for cell in engine.cells:
            finish(mine, engine, cell, seconds=1.0 if cell.tree else 2.0)
    score(mine)
    return mine


def rows_of(mine: Plan, parts: tuple[str, ...] = PARTS) -> list[dict[str, Any]]:
    """Make rows of what is stored."""
    cells, scores = split_scores(mine, mine.finished())
    return Evidence(cells, scores).rows(SIZES.entries(parts))["rows"]


def test_every_side_has_one_valid_engine_for_all_its_trees(
    tmp_path: Path, heads: dict[str, str]
) -> None:
    """Red when a side needs two engines, or the spec-config's keys change."""
    jobs = [job for _, job in plan(tmp_path, heads).todo()]
    assert [job.side.name for job in jobs] == list(SIDES)
    for job in jobs[1:]:
        config = parse_spec_config(job.side.engine["speculative_config"])
        trees = [tree.config for tree in config.scheduled_trees()]
        for cell in job.cells:
            assert cell.tree is not None
            assert any(tree == tree.with_shape(cell.tree) for tree in trees), cell.name


def test_engines_are_the_same_whatever_parts_are_chosen(
    tmp_path: Path, heads: dict[str, str]
) -> None:
    """Red when a part that is added later is measured with another engine."""
    all_sides = {
        engine.side.name: engine.side for engine in plan(tmp_path, heads).engines
    }
    for engine in plan(tmp_path, heads, ("figure5",)).engines:
        assert engine.side == all_sides[engine.side.name]


def test_runs_of_several_parts_are_run_once(
    tmp_path: Path, heads: dict[str, str]
) -> None:
    """Red when a run gets two names, or two runs one name."""
    engines = plan(tmp_path, heads).engines
    names = [(engine.side.name, c.name) for engine in engines for c in engine.cells]
    assert len(set(names)) == len(names) == 54
    entries = SIZES.entries()
    assert len(entries) == 58
    fields = {(e.key, e.cell.model_dump_json()) for e in entries}
    assert len(fields) == 54


def test_a_batch_repeats_prompts_where_there_are_too_few() -> None:
    """Red when a large batch of figure 6 is not full, or prompts are left out."""
    found = {e.cell.batch_size: e.cell.num_prompts for e in SIZES.entries(["figure6"])}
    assert found == {1: None, 2: None, 4: 4, 8: 8, 16: 16}


def test_table_2_compares_all_sides_at_all_temperatures() -> None:
    """Red when a way of acceptance or a temperature is dropped."""
    rows = SIZES.entries(["table2"])
    found = {(e.side, e.cell.temperature) for e in rows if e.cell.temperature}
    assert len(found) == 4 * len(TABLE2_TEMPERATURES)


def test_only_answers_of_the_tables_are_scored(
    tmp_path: Path, heads: dict[str, str]
) -> None:
    """Red when figures are scored, too, or scores are computed twice."""
    mine = finished_plan(tmp_path, heads)
    entries = SIZES.entries()
    rescoring = scoring(mine, entries, mine.finished())
    assert not rescoring.todo()
    [engine] = rescoring.engines
    assert len(engine.cells) == len({e.key for e in SIZES.entries(PARTS[:2])})
    rescoring.file(engine.side, engine.cells[0], 0).unlink()
    [(_, job)] = scoring(mine, entries, mine.finished()).todo()
    assert job.cells == engine.cells[:1]


def test_a_side_that_fails_does_not_stop_the_others(
    tmp_path: Path, heads: dict[str, str]
) -> None:
    """Red when one failing engine ends the command, or is tried in every round."""
    mine = plan(tmp_path, heads, rounds=2)
    started: list[str] = []

    def start(job: Job, log: Path) -> Generator[Event]:
        started.append(job.side.name)
        if job.side.name == "medusa":
            raise EngineError("medusa: no luck")
        yield from ()

    failed = execute(mine, lambda failed: None, start)
    assert failed == {"medusa": "medusa: no luck"}
    assert started == [*SIDES, *(side for side in SIDES if side != "medusa")]


def test_speed_ups_are_medians_of_ratios_within_a_round(
    tmp_path: Path, heads: dict[str, str]
) -> None:
    """Red when speeds of different rounds are compared, or another plain run."""
    mine = plan(tmp_path, heads, ("table1",), rounds=3)
    for engine in mine.engines:
        for cell in engine.cells:
            for round_, load in enumerate((1.0, 3.0, 10.0)):
                fast = 2.0 if cell.tree else 1.0
                seconds = load / fast * (1 + cell.temperature)
                finish(mine, engine, cell, round_, seconds=seconds)
    rows = {row["label"]: row for row in rows_of(mine, ("table1",))}
    typical = rows["ReDrafter, typical (lossy)"]
    assert typical["rounds"] == 3
    assert typical["speedup"] == pytest.approx(2.0)
    assert typical["speedup_over_greedy"] == pytest.approx(2.0 / 1.7)
    assert rows["plain, greedy"]["speedup"] == 1
    assert rows["plain, greedy"]["tokens_per_step"] is None
    assert typical["tokens_per_step"]["mean"] == pytest.approx(2.0)
    assert typical["mean_drafts"] == pytest.approx(5.0)


def test_quality_is_per_prompt_and_against_greedy_plain(
    tmp_path: Path, heads: dict[str, str]
) -> None:
    """Red when the errors are not over prompts, or the gain is not paired."""
    rows = rows_of(finished_plan(tmp_path, heads))
    [row] = [r for r in rows if (r["label"], r["temperature"]) == ("rejection", 0.3)]
    assert row["quality"]["mean"] == pytest.approx(-1.8)
    assert row["quality"]["error"] == pytest.approx(0.5)
    assert row["quality_gain"]["mean"] == pytest.approx(-0.3)
    assert row["quality_gain"]["error"] == pytest.approx(0.0, abs=1e-9)
    assert not [r for r in rows if r["part"] == "figure6" and r["quality"]]


def test_stretches_leave_out_the_prompt_and_the_cut_end() -> None:
    """Red when a step counts in another stretch than the one it begins in."""
    tree = {"beam_width": 4, "length": 5}
    cell = Cell(batch_size=1, temperature=0.0, tree=tree, max_tokens=8)
    found = stretches_of(cell, [[1, 2, 3, 2], [1, 4, 3]])
    # steps begin after 1 and 3 tokens, and after 1; stretches are of two tokens
    keys = ("first", "last", "num_steps")
    assert [tuple(s[key] for key in keys) for s in found] == [(1, 2, 2), (3, 4, 1)]
    assert [s["tokens_per_step"]["mean"] for s in found] == [3.0, 3.0]
    assert found[0]["tokens_per_step"]["error"] == pytest.approx(1.0)


def figure5_cell() -> Cell:
    """The first beam width."""
    return SIZES.entries(["figure5"])[0].cell


class FakeEngine:
    """An engine whose answers take steps of 1, 2 and 1 tokens."""

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.num_requests = 0
        self.job = SimpleNamespace(max_tokens=2)
        self.llm = SimpleNamespace(collective_rpc=self.collective_rpc, llm_engine=self)
        self.left: list[list[int]] = []

    def collective_rpc(self, call: Any, args: tuple[Any, ...] = ()) -> list[Any]:
        self.calls.append((call, args))
        return [{"node_counts": {5: 3}}]

    def prompts_of(self, cell: Cell) -> list[str]:
        return ["hello", "good morning"]

    def params(self, temperature: float, max_tokens: int) -> SimpleNamespace:
        assert max_tokens == 16
        return SimpleNamespace()

    def read_counters(self) -> list[int]:
        return []

    def add_acceptance(self, result: CellResult, before: list[int]) -> None:
        result.steps = 2

    def add_request(self, name: str, prompt: str, params: SimpleNamespace) -> None:
        self.left = [[1], [2, 3], [4]]

    def has_unfinished_requests(self) -> bool:
        return bool(self.left)

    def step(self) -> list[Any]:
        output = RequestOutput.__new__(RequestOutput)
        output.outputs = [SimpleNamespace(token_ids=self.left.pop(0))]
        return [output]

    def time_answers(self, cell: Cell) -> str:
        self.calls.append("time")
        return "result"


def test_steps_are_traced_with_their_trees() -> None:
    """Red when figure 5 loses its steps, its nodes or the answers."""
    engine: Any = FakeEngine()
    result = traced(engine, figure5_cell())
    assert result.details["step_tokens"] == [[1, 2, 1], [1, 2, 1]]
    assert result.details["node_counts"] == {5: 3}
    assert result.token_ids == [[1, 2, 3, 4]] * 2
    assert (result.num_tokens, result.steps) == ([4, 4], 2)


def test_chains_are_timed_and_then_put_away() -> None:
    """Red when beams without tree attention are not measured, or stay."""
    engine: Any = FakeEngine()
    assert measure_chains(engine, figure5_cell()) == "result"
    assert engine.calls == [
        (use_chains, (True,)),
        "time",
        (use_chains, (False,)),
    ]


def test_compression_holds_mean_and_percentiles() -> None:
    """Red when roots are counted, or a percentile is not of the trees."""
    tree = {"beam_width": 4, "length": 5}
    cell = Cell(batch_size=1, temperature=0.0, tree=tree, max_tokens=8)
    values = np.random.default_rng(0).integers(5, 20, size=500)
    counts = Counter(values.tolist())
    found = compression_of(cell, counts)
    assert (found["num_candidates"], found["num_trees"]) == (20, 500)
    assert found["mean"] == pytest.approx(values.mean())
    low, high = np.percentile(values, [1, 99], method="inverted_cdf")
    assert (found["low"], found["high"]) == (low, high)
    one = compression_of(cell, Counter({7: 1}))
    assert (one["low"], one["high"]) == (7, 7)


def test_workers_count_trees_by_their_nodes() -> None:
    """Red when figure 5b has nothing to be made of."""
    stats = StepStats()
    stats.count_trees([5, 7], [0, 2])
    stats.count_trees([7], [1])
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
    for parents in chains.parents.tolist():
        order, paths = depth_first(parents)
        assert [order.index(path[-1]) for path in paths] == [3, 6, 9]


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
    schedule = SimpleNamespace(forced_index=1)
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


def written(mine: Plan, heads: dict[str, str], **failed: str) -> str:
    """Write reports and return results.md."""
    finished = mine.finished()
    content = report.header({"commit": "abc"}, failed, finished)
    content |= evidence(mine, SIZES.entries(), heads, finished)
    report.write_json(mine.out, content)
    render(report.read_json(mine.out), mine.out)
    return (mine.out / "results.md").read_text()


@pytest.mark.thorough
def test_reports_hold_all_parts(
    tmp_path: Path, heads: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Red when a table, a picture or the provenance is left out of the results, or
    cannot be made again from results.json."""
    text = written(finished_plan(tmp_path, heads), heads, medusa="no luck")
    assert (
        "| ReDrafter, greedy | 0.00 M | 0 | 16.0 (16.0–16.0) | 2.00 ± 0.35 | 2.00× |"
        in text
    )
    assert "| 12 × 5 | 60 | 5.5 | 4 | 6 | 10.91 | 4 |" in text
    assert (
        "| ReDrafter, 8 beams, no tree attention | 16 | 1.0 | 16.0 (16.0–16.0) |"
        in text
    )
    assert "- medusa: no luck" in text
    assert "- commit: abc" in text
    content = report.read_json(tmp_path)
    assert {row["part"] for row in content["rows"]} == {"table1", "table2", "figure6"}
    for name in PARTS:
        assert (tmp_path / f"{name}.png").stat().st_size > 0
    without_pictures(monkeypatch)
    render(content, tmp_path)
    assert (tmp_path / "results.md").read_text() == text


def test_reports_are_written_of_what_is_finished(
    tmp_path: Path, heads: dict[str, str]
) -> None:
    """Red when a cut run leaves no results, as while plain decoding is missing."""
    mine = plan(tmp_path, heads)
    [engine] = [e for e in mine.engines if e.side.name == "redrafter-typical"]
    warm = [cell for cell in engine.cells if cell.temperature == 0.7]
    finish(mine, engine, warm[0])
    assert "ReDrafter, typical (lossy)" in written(mine, heads)
    assert (tmp_path / "table1.png").stat().st_size > 0
