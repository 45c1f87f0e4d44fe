"""The workload table: prompts, sides, cells, reports. No engine."""

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer import Typer
from typer.testing import CliRunner

from benchmarks import plot, workload_report
from benchmarks.rounds import Plan
from benchmarks.run import models_of, run
from benchmarks.sides import tree_sides
from benchmarks.workload_sides import workload_cells, workload_sides
from benchmarks.workloads import READING_TASKS, WorkloadError, load_workloads
from vllm_treespec.tools.rows import summarise, with_speedups
from vllm_treespec.tools.sides import Cell, CellResult, Job, plain_side, tree_side

NAMES = ["chat", "code", "mathematics", "editing", "reading"]
SUFFIX = {"method": "suffix_tree", "num_drafts": 16, "depth": 12}


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    """Write JSONL, compressed when the name says so."""
    text = "".join(json.dumps(row) + "\n" for row in rows).encode()
    path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Small files in the form of the public data sets."""
    talk = {"category": "writing", "turns": ["Write a poem.", "Longer."]}
    extraction = {"category": "extraction", "turns": ["Extract.", "More."]}
    long = {"category": "stem", "turns": ["word " * 301, "More."]}
    write(tmp_path / "mt_bench_question.jsonl", [talk, extraction, long, talk])
    problems = [
        {
            "prompt": f"def f{n}(x):\n",
            "entry_point": f"f{n}",
            "canonical_solution": f"    return x + {n}\n",
        }
        for n in range(8)
    ]
    write(tmp_path / "HumanEval.jsonl.gz", problems)
    write(tmp_path / "gsm8k_train.jsonl", [{"question": f"{n} + 1?"} for n in range(4)])
    tasks = [
        {"id": name, "instruction": "Who?", "instances": [{"input": f"Text {name}."}]}
        for name in ("seed_task_0", *READING_TASKS)
    ]
    write(tmp_path / "self_instruct_seed_tasks.jsonl", tasks[:3])
    write(tmp_path / "self_instruct_user_oriented.jsonl", tasks[3:])
    return tmp_path


def test_prompts_of_all_workloads_from_a_folder(folder: Path) -> None:
    """Red when a workload is lost, a long prompt stays, or a task that is not
    answered from its text is read."""
    found = load_workloads(folder, [], 2)
    assert list(found) == NAMES
    assert found["chat"] == ["Write a poem."] * 2
    assert all("seed_task_0." not in prompt for prompt in found["reading"])
    assert found == load_workloads(folder, [], 2)


def test_edited_functions_are_not_those_to_write(folder: Path) -> None:
    """Red when a problem of the code workload is solved in an editing prompt."""
    found = load_workloads(folder, ["code", "editing"], 4)
    to_write = [p.split("def ")[1].split("(")[0] for p in found["code"]]
    to_edit = [p.split("def ")[1].split("(")[0] for p in found["editing"]]
    assert sorted(to_write) == ["f0", "f2", "f4", "f6"]
    assert sorted(to_edit) == ["f1", "f3", "f5", "f7"]
    assert all("return x" in prompt for prompt in found["editing"])


def test_any_jsonl_with_workloads_is_taken(tmp_path: Path) -> None:
    """Red when a file's own workloads are refused or its order is changed."""
    path = tmp_path / "own.jsonl"
    rows = [{"workload": name, "prompt": f"{name} {n}"} for n in "12" for name in "ab"]
    write(path, rows)
    assert load_workloads(path, ["b"], 2) == {"b": ["b 1", "b 2"]}


@pytest.mark.parametrize(
    ("spoil", "names", "message"),
    [
        (lambda f: (f / "gsm8k_train.jsonl").unlink(), [], "no .*gsm8k_train.jsonl"),
        (
            lambda f: (f / "gsm8k_train.jsonl").write_text("{oops\n"),
            ["mathematics"],
            "gsm8k_train.jsonl line 1 is not JSON",
        ),
        (lambda f: None, ["poems"], "no workload 'poems'; it holds chat, code"),
        (lambda f: None, ["mathematics"], "4 prompts .* lower --batch-sizes"),
    ],
)
def test_missing_data_is_refused_in_one_line(
    folder: Path, spoil: Callable[[Path], None], names: list[str], message: str
) -> None:
    """Red when a message does not name the file or the workload."""
    spoil(folder)
    with pytest.raises(WorkloadError, match=message):
        load_workloads(folder, names, 5 if names == ["mathematics"] else 2)


def test_methods_without_a_draft_model_get_none() -> None:
    """Red when a model is filled into a method that takes none."""
    [side] = tree_sides([SUFFIX], "draft", [True])
    assert "model" not in side.engine["speculative_config"]
    [side] = tree_sides([{"method": "sd", "depth": 2}], "draft", [True])
    assert side.engine["speculative_config"]["model"] == "draft"
    with pytest.raises(ValueError, match="name one with --draft"):
        tree_sides([{"method": "sd", "depth": 2}], None, [True])
    with pytest.raises(ValueError, match="name one with --head"):
        tree_sides([{"method": "redrafter"}], "draft", [True])


def test_sides_are_those_that_have_their_model() -> None:
    """Red when a side without its model is planned, or the suffix tree finds the
    answers of earlier cells."""
    sides = workload_sides([], None, {}, 6, [True])
    names = [side.name for side in sides]
    assert names == ["plain-eager", "plain-compiled", "ngram-6", "suffix_tree-16x12"]
    assert sides[-1].engine["speculative_config"]["max_cached_tokens"] == 0
    names = [side.name for side in workload_sides([], "draft", {}, 6, [True])]
    assert names[-3:] == ["sd-3", "rsd_c-2.1.1", "rsd_s-2x3"]
    [*_, only] = workload_sides([{"method": "sd", "depth": 2}], "d", {}, 6, [True])
    assert only.name == "sd-2"


def test_another_target_needs_a_draft_model_of_its_own() -> None:
    """Red when the shipped draft model is taken for another target in silence."""
    with pytest.raises(ValueError, match="--draft"):
        models_of("other", None, [], shipped_heads=True)
    assert models_of("other", "none", [], shipped_heads=True).draft is None
    assert models_of("other", "", [], shipped_heads=True).draft is None
    assert models_of("other", "mine", [], shipped_heads=True).draft == "mine"


def test_larger_batches_have_a_prompt_for_each_request() -> None:
    """Red when a cell's number of prompts is not its batch size."""
    cells = workload_cells(["chat"], [1, 4, 16], [0.0], 3)
    assert [cell.num_prompts for cell in cells] == [3, 4, 16]


def test_settings_without_workloads_are_as_before() -> None:
    """Red when runs stored before there were workloads would be refused."""
    cell = Cell(batch_size=1, temperature=0.0)
    side = plain_side("plain-eager", eager=True)
    job = Job(side=side, target="t", prompts=["a"], cells=[cell], max_tokens=4)
    assert set(cell.model_dump()) == {"batch_size", "temperature"}
    assert "workloads" not in job.model_dump()
    full = Cell(batch_size=1, temperature=0.0, workload="chat", num_prompts=3)
    assert Cell.model_validate_json(full.model_dump_json()) == full
    with_workloads = job.model_copy(update={"workloads": {"chat": ["hello"]}})
    restored = Job.model_validate_json(with_workloads.model_dump_json())
    assert restored.workloads == {"chat": ["hello"]}


def result(cell: Cell, seconds: float) -> CellResult:
    """Make a result of 4 tokens."""
    return CellResult(
        cell=cell, seconds=seconds, num_tokens=[4], tpot_ms=[1.0], token_ids=[[0] * 4]
    )


def test_report_names_the_best_side_of_each_workload(tmp_path: Path) -> None:
    """Red when speed-ups land in another column or a slow method is advised."""
    plain = plain_side("plain-eager", eager=True)
    suffix = tree_side(SUFFIX, eager=True)
    cells = workload_cells(["chat", "editing"], [1, 4], [0.0, 1.0], 1)
    seconds = {"chat": 4.0, "editing": 1.0}
    rows = [summarise(plain, [result(cell, 4.0)]) for cell in cells]
    rows += [summarise(suffix, [result(c, seconds[c.workload])]) for c in cells]
    rows = with_speedups(rows)
    text = workload_report.markdown(rows, {"sd-3": "no luck"}, {"commit": "abc"})
    assert "- chat: plain vLLM (the best other is suffix_tree-16x12 1.00×) at" in text
    assert "- editing: suffix_tree-16x12 4.00× at T = 0; suffix_tree-16x12 4" in text
    assert "| side | chat 1 | chat 4 | editing 1 | editing 4 |" in text
    assert "| suffix_tree-16x12 | 1.00× | 1.00× | 4.00× | 4.00× |" in text
    assert "| fastest plain, tokens/s | 1.0 | 1.0 | 1.0 | 1.0 |" in text
    assert "- sd-3: no luck" in text
    plot.draw_workloads(rows, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 0


def test_greedy_only_sides_have_no_sampled_cells(tmp_path: Path) -> None:
    """Red when stock ngram is sampled."""
    sides = workload_sides([], None, {}, 6, [True])
    plan = Plan(
        sides=sides,
        rounds=1,
        cells=workload_cells(["chat"], [1], [0.0, 1.0], 1),
        prompts=[],
        target="t",
        max_tokens=4,
        out=tmp_path,
        models="",
        commit=None,
        workloads={"chat": ["hello"]},
    )
    [ngram] = [side for side in sides if side.family == "ngram"]
    assert [c.temperature for c in plan.job(ngram, 0).cells] == [0.0]
    assert plan.job(ngram, 0).workloads == {"chat": ["hello"]}


def test_the_command_plans_another_pair(folder: Path, tmp_path: Path) -> None:
    """Red when `--workloads` needs a draft model, or takes no data in silence."""
    app = Typer()
    app.command()(run)
    common = ["--workloads", "chat,editing", "--target", str(folder), "--dry-run"]
    common += ["--batch-sizes", "1", "--num-prompts", "2", "--out", str(tmp_path / "o")]
    data = ["--workload-data", str(folder)]
    done = CliRunner().invoke(app, [*common, *data, "--draft", "none"])
    assert done.exit_code == 0, done.output
    assert "plain-compiled ngram-6 suffix_tree-16x12\n" in done.output
    for arguments, named in ((data, "--draft"), (["--draft", "x"], "--workload-data")):
        done = CliRunner().invoke(app, [*common, *arguments])
        assert done.exit_code == 1
        assert named in done.output
