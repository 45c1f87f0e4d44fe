"""The GPU experiments without a card: inputs, cells, reports, refusals."""

from __future__ import annotations

import json
from functools import partial
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.gpu import card, end_to_end, heads, kernel, shapes, step
from benchmarks.gpu.end_to_end import COLUMNS, comparisons, lossless_sides
from benchmarks.gpu.engine import ForwardTimers
from benchmarks.gpu.kernel_calls import (
    CHAIN,
    FA3,
    STOCK,
    TREE,
    Batch,
    Case,
    make_batch,
    reference,
    relative_error,
)
from benchmarks.gpu.step import (
    PLAIN_DEFAULT,
    PLAIN_SYNC,
    Work,
    named_sides,
    random_plan,
    row_of,
)
from benchmarks.harness.models import Models
from benchmarks.harness.plan import (
    Plan,
    StoredCell,
    base_job,
    execute,
    make_plan,
    run_plan,
)
from benchmarks.harness.report import table_of, written
from tests.fast.stored_cells import measured as measured_cell
from tests.fast.stored_cells import reported, without_pictures
from tests.reference import attention
from vllm_treespec.heads import load_eagle_head
from vllm_treespec.tools.sides import Acceptance, Cell, CellResult, Side
from vllm_treespec.tools.store import settings_of, store

ORIGIN = {"command": "python -m benchmarks gpu", "commit": "abc", "card": {"name": "X"}}
PAGING = {"page_size": 4, "layout": "nhd", "max_model_len": 64}


def tiny_batch(nodes: int, context: int, **paging: Any) -> Batch:
    """A batch of two requests on the tiny shape, in float32."""
    case = Case("tiny", nodes, context, 2, **{**PAGING, **paging})
    return make_batch(case, torch.float32, "cpu")


def test_masks_are_ancestors() -> None:
    """Red when the kernel table's masks leave the tree's ancestors, node 63 too."""
    for num_nodes in (1, 2, 17, 64):
        batch = tiny_batch(num_nodes, 3)
        assert batch.tree.num_nodes.tolist() == [num_nodes] * 2
        expected = [
            attention.mask_bits(attention.ancestors(parents, node))
            for parents in batch.tree.parents.tolist()
            for node in range(num_nodes)
        ]
        assert batch.metadata["node_masks"].tolist() == expected


def key_by_key(batch: Batch, tree: bool) -> torch.Tensor:
    """Attention of the same batch by the tests' reference, in float64."""
    case = batch.case
    requests = [
        attention.Request(case.context, parents=tuple(parents))
        if tree
        else attention.Request(case.context, case.nodes)
        for parents in batch.tree.parents.tolist()
    ]
    same = attention.Batch(
        requests, batch.query, batch.key_cache, batch.value_cache, batch.metadata
    )
    return attention.reference(same, batch.query.shape[2] ** -0.5)


def test_reference_is_attention() -> None:
    """Red when the float64 reference reads other pages, heads or masks than it says."""
    for layout, tree in product(("nhd", "hnd"), (True, False)):
        batch = tiny_batch(5, 7, layout=layout)
        assert batch.metadata["block_table"].shape == (2, 16)
        both = torch.cat([reference(batch, request, tree) for request in (0, 1)])
        torch.testing.assert_close(both, key_by_key(batch, tree))
        assert batch.kv_bytes == 2 * 12 * 2 * 2 * 64 * 4


def test_wrong_outputs_are_seen() -> None:
    """Red when a NaN, or one wrong row of the last request, passes the check."""
    batch = tiny_batch(3, 6)
    output = torch.cat([reference(batch, r, True) for r in (0, 1)])
    assert relative_error(batch, output, tree=True) == 0
    output[-1, 0, 0] += 1
    assert relative_error(batch, output, tree=True) > 0.1
    output[-1, 0, 0] = torch.nan
    assert relative_error(batch, output, tree=True) == torch.inf


def test_timers_count_forwards() -> None:
    """Red when timers change what a forward returns, or count it twice."""
    runner = SimpleNamespace(
        device=torch.device("cpu"),
        _model_forward=lambda tokens: tokens + 1,
        model=SimpleNamespace(compute_logits=lambda hidden: hidden * 2),
    )
    timers = ForwardTimers(SimpleNamespace(model_runner=runner))
    assert runner._model_forward(3) == 4
    assert runner.model.compute_logits(3) == 6
    assert all(ms > 0 for ms in timers.take().values())
    assert timers.take() == {"layers": 0, "logits": 0}


def measured(case: Case, wrong: list[str] | None = None, **us: float) -> dict[str, Any]:
    """What ``kernel.measure`` gives for a cell, with these times by side."""
    return {
        "kv_bytes": 2_000_000,
        "us": {name.replace("_", "-"): value for name, value in us.items()},
        "best_us": {},
        "errors": {"float32": {TREE: 1e-6}, "bfloat16": {TREE: 2e-3, STOCK: 2e-3}},
        "wrong": wrong or [],
        "missing": {} if "fa3" in us else {FA3: "FA3 is unavailable"},
    }


def kernel_plan(out: Path, contexts: str, deciding: str = "this card") -> Plan:
    """Plan cells of 32 nodes on the 8B shape."""
    engines = [kernel.engine_of("8b", 1, "32", contexts, PAGING)]
    return make_plan(base_job("", [], 0), engines, out, deciding)


@pytest.fixture
def no_card(monkeypatch: pytest.MonkeyPatch) -> dict[int, dict[str, Any]]:
    """Measure cells of these contexts without a card; returns their results."""
    times = {"tree": 11.0, "chain": 10.0, "stock_triton": 10.0}
    results: dict[int, dict[str, Any]] = {512: times}

    def measure(case: Case, repeats: int) -> dict[str, Any]:
        assert repeats == 7
        return measured(case, **results.pop(case.context))

    monkeypatch.setattr(kernel, "measure", measure)
    monkeypatch.setattr(card, "copy_bandwidth", lambda: 4000.0)
    return results


def run_kernel(plan: Plan) -> None:
    """Run a plan of the kernel table as its command does."""
    measure = partial(execute, start=partial(kernel.measure_cells, 7))
    run_plan(plan, ORIGIN, kernel.contents, kernel.render, measure=measure)


def test_kernel_report(
    tmp_path: Path,
    no_card: dict[int, dict[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Red when a ratio, a bandwidth or a missing kernel is written wrongly.

    Or when finished cells can only be read where they were measured.
    """
    wrong = {"wrong": ["bfloat16 chain 9.0e-01"]}
    no_card[8192] = {"tree": 1.0, "chain": 1.0, "stock_triton": 2.0, "fa3": 1.0} | wrong
    run_kernel(kernel_plan(tmp_path, "8192,512"))
    text = (tmp_path / "results.md").read_text()
    assert (
        "| 32 | 512 | 11.0 | 10.0 | 10.0 | – | 1.10× | – | 1.10× | 182 | 5 % |" in text
    )
    assert "| 1.0 | 1.0 | 2.0 | 1.0 | 0.50× | 1.00× | 1.00× | 2000 | 50 % |" in text
    assert "FA3 is unavailable" in text
    assert "8b-b1-n32-c8192: bfloat16 chain 9.0e-01" in text
    assert (tmp_path / "8b.png").stat().st_size > 1000
    content = json.loads((tmp_path / "results.json").read_text())
    assert [cell["context"] for cell in content["cells"]] == [512, 8192]
    assert CHAIN in content["cells"][0]["us"]
    assert content["cells"][0]["page_size"] == 4
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    without_pictures(monkeypatch)
    content["provenance"] = card.origin("gpu-kernel", "abc")
    assert content["provenance"]["commit"] == "abc"
    (tmp_path / "results.json").write_text(json.dumps(content))
    (tmp_path / "results.md").unlink()
    assert "| 32 | 512 | 11.0 |" in reported(tmp_path)


def test_cells_are_kept_and_not_mixed(
    tmp_path: Path,
    no_card: dict[int, dict[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Red when a finished cell is measured again, or cells of two cards are mixed."""
    without_pictures(monkeypatch)
    run_kernel(kernel_plan(tmp_path, "512"))
    assert not no_card
    [(_, job)] = kernel_plan(tmp_path, "512,1024").todo()
    assert [cell.options["context"] for cell in job.cells] == [1024]
    assert settings_of({"card": "another"}) != settings_of({"card": "this"})
    with pytest.raises(ValueError, match="other settings"):
        kernel_plan(tmp_path, "512", "another card")


def test_errors_that_are_no_numbers_are_shown(tmp_path: Path) -> None:
    """Red when a NaN of a kernel, stored as None, breaks the table."""
    column = kernel.COLUMNS["bfloat16 error"]
    assert written({"errors": {"bfloat16": {TREE: None}}}, column) == "–"


def plan_of(out: Path, batches: list[int], **more: Any) -> Plan:
    """Plan of the step table, on 8B."""
    work = Work("steps", batches, [0.7], 8, 4, 0.0, {"seed": 3, **more})
    return random_plan("8b", named_sides("8", ""), work, out, fresh=False)


def test_resumed_plans_leave_finished_cells_out(tmp_path: Path) -> None:
    """Red when a resumed run starts an engine that has nothing to do."""
    plan = plan_of(tmp_path, [1, 8])
    jobs = [job for _, job in plan.todo()]
    sync, default, ngram, eagle, ours, v2, trees, hybrid = (job.side for job in jobs)
    assert [len(job.cells) for job in jobs] == [2] * 8
    # its weights are written when it is run
    specs = [side.engine["additional_config"]["treespec"] for side in (trees, hybrid)]
    assert [spec["method"] for spec in specs] == ["eagle_tree", "hybrid"]
    assert [spec["num_drafts"] for spec in specs] == [7, 7]
    assert trees.environment == v2.environment
    assert ngram.engine["speculative_config"]["method"] == "ngram_gpu"
    assert (Path(eagle.engine["speculative_config"]["model"]) / "config.json").exists()
    assert not v2.one_process
    assert v2.environment == {"VLLM_USE_V2_MODEL_RUNNER": "1"}
    assert v2.engine["speculative_config"]["method"] == "ngram_gpu"
    assert sync.environment == {"VLLM_USE_V2_MODEL_RUNNER": "0"}
    assert sync.engine["async_scheduling"] is False
    assert all(side.engine["seed"] == 3 for side in (sync, default, ours))
    assert "async_scheduling" not in default.engine
    assert not default.one_process
    assert jobs[4].cells[0].options["acceptance"] == 0.7
    config = json.loads((Path(ours.engine["model"]) / "config.json").read_text())
    assert config["head_dim"] == 128
    for job, cell in ((jobs[0], 0), (jobs[0], 1), (jobs[4], 0)):
        plan.keep(job, 0, engine_result(job.cells[cell]))
    left = plan_of(tmp_path, [1, 8, 32]).todo()
    assert [(job.side.name, len(job.cells)) for _, job in left] == [
        ("8b-plain-v1-sync", 1),
        ("8b-plain-default", 3),
        ("8b-stock-ngram", 3),
        ("8b-stock-eagle3", 3),
        ("8b-ours-8", 2),
        ("8b-ours-v2-8", 3),
        ("8b-eagle-v2-8", 3),
        ("8b-hybrid-v2-8", 3),
    ]
    with pytest.raises(ValueError, match="other settings"):
        plan_of(tmp_path, [1, 8], enforce_eager=True)


def test_heads_of_random_weights(tmp_path: Path) -> None:
    """Red when the step table's head is none that engines load."""
    shape = shapes.Shape(64, 128, 8, 4, 2, 16, 100)
    heads.write_weights(tmp_path, "small", shape)
    head = load_eagle_head(str(heads.folder_of(tmp_path, "small")), 8)
    assert head.config.layers == (2, 4, 5)
    assert head.config.hidden_size == 64


def engine_result(cell: Cell, seconds: float = 1.0, **more: Any) -> CellResult:
    """What was measured in 100 steps."""
    chosen = {"runner": "V1"}
    details = {"forward_ms": {"layers": 600.0, "logits": 100.0}, "chosen": chosen}
    fields = {"num_tokens": [100], "steps": 100, "details": details, **more}
    return measured_cell(cell, seconds, **fields)


def engine_cell(
    name: str, nodes: int, seconds: float, rate: float | None = None
) -> StoredCell:
    """A cell of the step table."""
    family = step.FAMILY if nodes else "plain"
    side = Side(name=f"8b-{name}", family=family, engine={}, budget=max(nodes - 1, 0))
    work = Work("steps", [1], [rate or 0.0], 8, 4, 0.0, {})
    (cell,) = work.cells("8b", side)
    more: dict[str, Any] = {}
    if nodes:
        more = {"num_tokens": [240], "stage_seconds": {"score": 0.01}}
        more["acceptance"] = Acceptance(trees=10, at_least=[14])
    if name == PLAIN_DEFAULT:
        more["details"] = {"forward_ms": {}, "chosen": {"runner": "V2"}}
    result = engine_result(cell, seconds, **more)
    return StoredCell(settings="s", commit="abc", side=side, round=0, result=result)


def test_step_report(tmp_path: Path) -> None:
    """Red when a step is set against another batch, or forwards count as outside."""
    cells = [
        engine_cell(PLAIN_SYNC, 0, 0.80),
        engine_cell(PLAIN_DEFAULT, 0, 0.75),
        engine_cell("ours-32", 32, 0.88, 0.7),
    ]
    assert row_of(cells[2])["outside_ms"] == pytest.approx(1.8)
    assert row_of(cells[1])["outside_ms"] is None
    failed = {"8b-ours-64": "no memory"}
    content = {"provenance": ORIGIN, "failed": failed, **step.contents(cells)}
    step.render(content, tmp_path)
    text = (tmp_path / "results.md").read_text()
    row = (
        "| ours-32 | 1 | 0.7 | 273 | 8.80 | 1.10× | 1.17× | 7.00 | 1.80 | – | 0.10 "
        "| – | – | 2.40 |"
    )
    assert row in text
    assert "- 8b-ours-64: no memory" in text
    assert "plain-v1-sync: runner V1" in text
    assert (tmp_path / "results.png").stat().st_size > 1000


def answers(side: str, *token_ids: list[list[int]], **cell: Any) -> list[StoredCell]:
    """A side's answers in float32, at batch sizes 1, 2, ..., greedy unless told."""
    engine = {"dtype": "float32"}
    accepted = Acceptance(trees=2, at_least=[1]) if side != "plain" else None
    return [
        StoredCell(
            settings="s",
            commit=None,
            side=Side(name=f"float32-{side}", family=side, engine=engine),
            round=0,
            result=measured_cell(
                Cell(**{"batch_size": batch, "temperature": 0.0, **cell}),
                num_tokens=[len(ids) for ids in answered],
                tpot_ms=[None] * len(answered),
                token_ids=answered,
                acceptance=accepted,
            ),
        )
        for batch, answered in enumerate(token_ids, 1)
    ]


def test_differences_are_found(tmp_path: Path) -> None:
    """Red when an answer that differs, or ends early, counts as identical."""
    compared = comparisons(
        [
            *answers("sd", [[1, 2, 3], [4, 5]], [[1, 2, 9], [4]]),
            *answers("plain", [[1, 2, 3], [4, 5]], [[1, 2, 3], [4, 6]]),
        ]
    )
    assert [
        (row["side"], row["batch"], row["identical"], row["differences"])
        for row in compared
    ] == [
        ("plain", 2, 1, [(1, 1)]),
        ("sd", 1, 2, []),
        ("sd", 2, 0, [(0, 2), (1, 1)]),
    ]
    text = table_of(compared, COLUMNS)
    assert "| sd | 0 | float32 | 2 | 0 of 2 | 5 | 1.50 | 0:2 1:1 |" in text
    assert "| plain, other batch | 0 | float32 | 2 | 1 of 2 |" in text
    for part, cells in {
        "lossless": [*answers("plain", [[1]]), *answers("sd", [[1]])],
        "speed": [
            engine_cell(PLAIN_SYNC, 0, 0.8),
            engine_cell("ours-32", 32, 0.96, 0.8),
        ],
    }.items():
        for cell in cells:
            store(tmp_path / part / "cells" / cell.side.name / "cell.0.json", cell)
    end_to_end.run_plans([], tmp_path, ORIGIN)
    text = (tmp_path / "results.md").read_text()
    assert "| sd | 0 | float32 | 1 | 1 of 1 | 1 | 1.50 | none |" in text
    assert "| ours-32 | 1 | 0.8 | 250 | 9.60 | 2.00× | – |" in text
    assert (tmp_path / "results.png").stat().st_size > 1000


def test_sampled_answers_are_compared_in_one_engine() -> None:
    """Red when a sampled answer is compared with another engine's, or a greedy one."""

    def sampled(side: str, drafts: bool, *token_ids: list[list[int]]) -> list[Any]:
        options = {"drafts": drafts}
        return answers(side, *token_ids, temperature=1.0, options=options)

    compared = comparisons(
        [
            *answers("plain", [[1, 2]]),
            *answers("hybrid", [[1, 2]]),
            *sampled("hybrid", True, [[3, 4]], [[3, 5]]),
            *sampled("hybrid", False, [[3, 4]], [[3, 4]]),
            *sampled("lyanna", True, [[3, 6]]),
            *sampled("lyanna", False, [[3, 6]]),
        ]
    )
    assert [
        (row["side"], row["temperature"], row["batch"], row["identical"])
        for row in compared
    ] == [
        ("hybrid", 0, 1, 1),
        ("hybrid", 1, 1, 1),
        ("hybrid", 1, 2, 0),
        ("plain", 1, 2, 1),
        ("lyanna", 1, 1, 1),
    ]


def test_lossless_sides() -> None:
    """Red when sides are compared in other dtypes, products or attention than said."""
    work = Work("answers", [1], [0.8], 8, 12, 0.0, {"seed": 3})
    models, dtypes = Models("target", "draft"), ["float32", "bfloat16"]
    sides = {side.name: side for side in lossless_sides(models, ["sd"], dtypes, work)}
    assert list(sides) == [
        f"{dtype}-{name}" for dtype in dtypes for name in ("plain", "sd")
    ]
    for name, side in sides.items():
        assert side.engine["attention_backend"] == "TRITON_ATTN"
        assert name.startswith(side.engine["dtype"])
        exact = side.engine["dtype"] == "float32"
        assert ("TRITON_F32_DEFAULT" in side.environment) == exact
        assert side.environment["VLLM_USE_V2_MODEL_RUNNER"] == "0"
    said = r'{"method": "redrafter", .*} needs a model; name one with --head'
    with pytest.raises(ValueError, match=said):
        lossless_sides(models, ["redrafter"], ["float32"], work)
