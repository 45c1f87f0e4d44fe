"""The GPU benchmarks without a card: inputs, cells, reports, refusals."""

from __future__ import annotations

import json
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

from benchmarks.gpu import end_to_end, end_to_end_report, kernel, step, step_report
from benchmarks.gpu.cells import CellFolder, settings_of
from benchmarks.gpu.end_to_end_report import lossless_table, speed_table
from benchmarks.gpu.engines import (
    PLAIN_DEFAULT,
    PLAIN_SYNC,
    EngineCell,
    Options,
    our_side,
    plain_sides,
    tasks_of,
)
from benchmarks.gpu.kernel_inputs import (
    Batch,
    Case,
    Paging,
    make_batch,
    masks_of,
    random_parents,
    reference,
    relative_error,
    visible,
)
from benchmarks.gpu.kernel_report import KernelCell
from benchmarks.gpu.kernel_report import write as write_kernel
from benchmarks.gpu.kernel_sides import CHAIN, FA3, STOCK, TREE
from benchmarks.gpu.lossless import Comparison, LosslessCell, comparisons
from benchmarks.gpu.timers import start_timers, take_times
from vllm_treespec.core.tree import ancestor_mask
from vllm_treespec.core.tree_builders import from_parents
from vllm_treespec.tools.sides import Acceptance, Cell, CellResult, SideResult

ORIGIN = {"command": "python -m benchmarks.gpu", "commit": "abc", "card": {"name": "X"}}
PAGING = Paging(page_size=4, layout="nhd", max_model_len=64)


def signed_bits(row: Tensor) -> int:
    """A row of a mask as a signed 64-bit number."""
    bits = sum(1 << node for node, seen in enumerate(row.tolist()) if seen)
    return bits - 2**64 if bits >= 2**63 else bits


@pytest.mark.parametrize("num_nodes", [1, 2, 17, 64])
def test_masks_are_ancestors(num_nodes: int) -> None:
    """Red when the kernel table's masks leave the tree's ancestors, node 63 too."""
    rng = random.Random(num_nodes)
    for _ in range(5):
        parents = random_parents(num_nodes, rng)
        tree = from_parents([[0] * num_nodes], [sorted(parents)])
        expected = [signed_bits(row) for row in ancestor_mask(tree)[0]]
        assert masks_of(sorted(parents)) == expected


def dense(batch: Batch, request: int, tree: bool) -> Tensor:
    """Attention of a request, key by key through the block table."""
    nodes, seq_len = batch.case.nodes, batch.case.context + batch.case.nodes
    page = batch.key_cache.shape[1]
    seen = visible(batch, request, tree)
    group = batch.heads.num_heads // batch.heads.num_kv_heads
    out = torch.zeros(nodes, batch.heads.num_heads, batch.heads.head_size)
    for row in range(nodes):
        for head in range(batch.heads.num_heads):
            keys, values = [], []
            for place in range(seq_len):
                if seen[row, place]:
                    block = int(batch.block_table[request, place // page])
                    at = (block, place % page, head // group)
                    keys.append(batch.key_cache[at])
                    values.append(batch.value_cache[at])
            query = batch.query[request * nodes + row, head]
            scores = torch.stack(keys) @ query * batch.scale
            out[row, head] = scores.softmax(dim=0) @ torch.stack(values)
    return out


@pytest.mark.parametrize("layout", ["nhd", "hnd"])
@pytest.mark.parametrize("tree", [True, False])
def test_reference_is_attention(layout: str, tree: bool) -> None:
    """Red when the float64 reference reads other pages, heads or masks than it says."""
    paging = Paging(page_size=4, layout=layout, max_model_len=64)
    batch = make_batch(Case("tiny", 5, 7, 2), torch.float32, "cpu", paging)
    assert batch.block_table.shape == (2, 16)
    found = reference(batch, 1, tree)
    torch.testing.assert_close(found.float(), dense(batch, 1, tree))
    assert batch.kv_bytes == 2 * 12 * 2 * 2 * 64 * 4


def test_wrong_outputs_are_seen() -> None:
    """Red when a NaN, or one wrong row of the last request, passes the check."""
    batch = make_batch(Case("tiny", 3, 6, 2), torch.float32, "cpu", PAGING)
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
    worker = SimpleNamespace(model_runner=runner)
    start_timers(worker)
    assert runner._model_forward(3) == 4
    assert runner.model.compute_logits(3) == 6
    assert all(ms > 0 for ms in take_times(worker).values())
    assert take_times(worker) == {"layers": 0, "logits": 0}


def kernel_cell(nodes: int, context: int, **ms: float) -> KernelCell:
    """A cell of the kernel table, times by side."""
    return KernelCell(
        name=Case("8b", nodes, context, 1).name,
        settings="s",
        commit="abc",
        shape="8b",
        nodes=nodes,
        context=context,
        batch=1,
        kv_bytes=2_000_000,
        copy_gb_per_s=4000.0,
        ms={name.replace("_", "-"): value for name, value in ms.items()},
        best_ms={},
        errors={"float32": {TREE: 1e-6}, "bfloat16": {TREE: 2e-3, STOCK: 2e-3}},
        missing={} if "fa3" in ms else {FA3: "FA3 is unavailable"},
    )


def test_kernel_report(tmp_path: Path) -> None:
    """Red when a ratio, a bandwidth or a missing kernel is told wrongly."""
    cells = [
        kernel_cell(32, 512, tree=0.011, chain=0.01, stock_triton=0.01),
        kernel_cell(32, 8192, tree=0.001, chain=0.001, stock_triton=0.002, fa3=0.001),
    ]
    assert cells[0].ratio(TREE, STOCK) == pytest.approx(1.1)
    assert cells[0].ratio(TREE, FA3) is None
    assert cells[1].gb_per_s(TREE) == pytest.approx(2000)
    cells[1].wrong = ["bfloat16 chain 9.0e-01"]
    write_kernel(cells, ORIGIN, tmp_path)
    text = (tmp_path / "results.md").read_text()
    assert (
        "| 32 | 512 | 11.0 | 10.0 | 10.0 | – | 1.10× | – | 1.10× | 182 | 5 % |" in text
    )
    assert "FA3 is unavailable" in text
    assert "8b-b1-n32-c8192: bfloat16 chain 9.0e-01" in text
    assert (tmp_path / "8b.png").stat().st_size > 1000
    content = json.loads((tmp_path / "results.json").read_text())
    assert content["provenance"]["commits"] == ["abc"]
    assert [cell["context"] for cell in content["cells"]] == [512, 8192]
    assert CHAIN in content["cells"][0]["ms"]


def test_cells_are_kept_and_not_mixed(tmp_path: Path) -> None:
    """Red when a finished cell is measured again, or cells of two cards are mixed."""
    folder = CellFolder(tmp_path, KernelCell, "s")
    cell = kernel_cell(8, 512, tree=1.0)
    assert folder.missing([cell.name, "other"]) == [cell.name, "other"]
    folder.add(cell)
    assert folder.missing([cell.name, "other"]) == ["other"]
    assert folder.read() == [cell]
    assert CellFolder(tmp_path, KernelCell, None).read() == [cell]
    other = settings_of({"card": "another"}, PAGING)
    assert other != settings_of({"card": "this"}, PAGING)
    with pytest.raises(ValueError, match="other settings"):
        CellFolder(tmp_path, KernelCell, other).read()


def options() -> Options:
    """Options of small engines."""
    return Options(context=8, count=4, temperature=0.0, extra={"seed": 3})


def test_tasks_leave_finished_cells_out(tmp_path: Path) -> None:
    """Red when a resumed run starts an engine that has nothing to do."""
    folder = CellFolder(tmp_path, EngineCell, "s")
    sides = [*plain_sides(), our_side(8)]
    work = {s.name: step.work_of("8b", s, [1, 8], 0.7, options()) for s in sides}
    tasks = tasks_of("8b", work, sides, options(), folder, "abc")
    assert [len(task.work) for task in tasks] == [2, 2, 2]
    assert tasks[0].side.environment == {"VLLM_USE_V2_MODEL_RUNNER": "0"}
    assert tasks[0].side.engine == {"async_scheduling": False, "seed": 3}
    assert tasks[1].side.engine == {"seed": 3}
    assert not tasks[1].side.one_process
    assert tasks[2].work[0].acceptance == 0.7
    assert json.loads((Path(tasks[0].model) / "config.json").read_text())["head_dim"]
    for name in ("8b-ours-8-b1", "8b-plain-v1-sync-b1", "8b-plain-v1-sync-b8"):
        folder.add(engine_cell("ours-8", 8, 1.0, name=name))
    left = tasks_of("8b", work, sides, options(), folder, "abc")
    assert [(task.side.name, len(task.work)) for task in left] == [
        (PLAIN_DEFAULT, 2),
        ("ours-8", 1),
    ]


def engine_cell(
    side: str, nodes: int, seconds: float, rate: float | None = None, name: str = ""
) -> EngineCell:
    """A cell of the step table: 100 steps."""
    work = options().work(name or side, "steps", 1, rate)
    return EngineCell(
        name=name or side,
        settings="s",
        commit="abc",
        shape="8b",
        side=side,
        nodes=nodes,
        work=work,
        seconds=seconds,
        steps=100,
        num_tokens=100 if not nodes else 240,
        forward_ms={"layers": 6.0, "logits": 1.0} if side != PLAIN_DEFAULT else {},
        stage_ms={"score": 0.1} if nodes else {},
        acceptance_length=2.4 if nodes else None,
        chosen={"runner": "V1"},
    )


def test_step_report(tmp_path: Path) -> None:
    """Red when a step is set against another batch, or forwards count as outside."""
    cells = [
        engine_cell(PLAIN_SYNC, 0, 0.80),
        engine_cell(PLAIN_DEFAULT, 0, 0.75),
        engine_cell("ours-32", 32, 0.88, 0.7),
    ]
    assert cells[2].outside_ms == pytest.approx(1.8)
    assert cells[1].outside_ms is None
    step_report.write(cells, ORIGIN, {"8b-ours-64": "no memory"}, tmp_path)
    text = (tmp_path / "results.md").read_text()
    row = (
        "| ours-32 | 1 | 8.80 | 1.10× | 1.17× | 7.00 | 1.80 | – | 0.10 | – | – | 2.40 |"
    )
    assert row in text
    assert "- 8b-ours-64: no memory" in text
    assert "plain-v1-sync: runner V1" in text
    assert (tmp_path / "results.png").stat().st_size > 1000


def answers(side: str, *token_ids: list[list[int]]) -> LosslessCell:
    """A side's answers in float32, at batch sizes 1, 2, ..."""
    cells = [
        CellResult(
            cell=Cell(batch_size=batch, temperature=0.0),
            seconds=1.0,
            num_tokens=[len(ids) for ids in found],
            tpot_ms=[None] * len(found),
            token_ids=found,
            acceptance=Acceptance(trees=2, at_least=[1]) if side != "plain" else None,
        )
        for batch, found in enumerate(token_ids, 1)
    ]
    result = SideResult(start_seconds=1.0, cells=cells)
    return LosslessCell(
        name=side, settings="s", commit=None, side=side, dtype="float32", result=result
    )


def test_differences_are_found(tmp_path: Path) -> None:
    """Red when an answer that differs, or ends early, counts as identical."""
    compared = comparisons(
        [
            answers("plain", [[1, 2, 3], [4, 5]], [[1, 2, 3], [4, 6]]),
            answers("sd", [[1, 2, 3], [4, 5]], [[1, 2, 9], [4]]),
        ]
    )
    assert [(c.side, c.batch, c.identical, c.differences) for c in compared] == [
        ("plain", 2, 1, ((1, 1),)),
        ("sd", 1, 2, ()),
        ("sd", 2, 0, ((0, 2), (1, 1))),
    ]
    text = lossless_table(compared)
    assert "| sd | float32 | 2 | 0 of 2 | 5 | 1.50 | 0:2 1:1 |" in text
    assert "| plain, other batch | float32 | 2 | 1 of 2 |" in text
    speeds = [engine_cell(PLAIN_SYNC, 0, 0.8), engine_cell("ours-32", 32, 0.96, 0.8)]
    assert "| ours-32 | 1 | 0.8 | 250 | 2.00× | – | 2.40 |" in speed_table(speeds)
    runs = [answers("plain", [[1]]), answers("sd", [[1]])]
    end_to_end_report.write(runs, speeds, ORIGIN, {}, tmp_path)
    assert "1 of 1" in (tmp_path / "results.md").read_text()
    assert (tmp_path / "results.png").stat().st_size > 1000


def test_identical_answers_say_none() -> None:
    """Red when a table without differences leaves its column empty."""
    same = Comparison("sd", "float32", 8, 8, 8, 96, (), 2.0)
    assert lossless_table([same]).endswith("| 8 of 8 | 96 | 2.00 | none |")


@pytest.mark.parametrize("module", [kernel, step, end_to_end])
def test_no_card_is_refused_in_one_sentence(
    module: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Red when a machine without a card gives a traceback, or numbers."""
    import typer

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    app = typer.Typer()
    app.command()(getattr(module, module.__name__.rsplit(".", 1)[1]))
    done = CliRunner().invoke(app, ["--out", str(tmp_path)])
    assert done.exit_code == 1
    assert "finds no CUDA device here" in done.output
    assert "Traceback" not in done.output
    assert not list(tmp_path.iterdir())


def test_report_needs_no_card(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Red when finished cells can only be read where they were measured."""
    import typer

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    CellFolder(tmp_path, KernelCell, "s").add(kernel_cell(8, 512, tree=1.0))
    app = typer.Typer()
    app.command()(kernel.kernel)
    done = CliRunner().invoke(app, ["--report", "--out", str(tmp_path)])
    assert done.exit_code == 0, done.output
    assert (tmp_path / "results.md").is_file()


@pytest.mark.parametrize("text", ["", "0", "1,x"])
def test_wrong_numbers_are_refused(text: str) -> None:
    """Red when a list that makes no sense is measured as something else."""
    with pytest.raises(ValueError, match="--nodes"):
        kernel.numbers(text, "--nodes")
