"""The workload table: prompts, sides, cells, reports. No engine."""

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from benchmarks import workloads
from benchmarks.__main__ import app
from benchmarks.harness import options
from benchmarks.harness.models import Models, find_models
from benchmarks.harness.rows import engines_of
from benchmarks.harness.work_prompts import READING_TASKS, find_workloads
from tests.fast.stored_cells import measured, rendered
from vllm_treespec.tools.prompts import PromptError
from vllm_treespec.tools.rows import summarise, with_speedups
from vllm_treespec.tools.sides import (
    Cell,
    CellResult,
    Job,
    Side,
    plain_side,
    tree_side,
    tree_sides,
)

NAMES = ["chat", "code", "mathematics", "editing", "reading"]
SUFFIX = {"method": "suffix_tree", "num_drafts": 32, "depth": 28}
SUFFIX_SIDE = "suffix_tree-32x28"


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
    found = find_workloads(folder, [], 2)
    assert list(found) == NAMES
    assert found["chat"] == ["Write a poem."] * 2
    assert all("seed_task_0." not in prompt for prompt in found["reading"])
    assert found == find_workloads(folder, [], 2)


def test_edited_functions_are_not_those_to_write(folder: Path) -> None:
    """Red when a problem of the code workload is solved in an editing prompt."""
    found = find_workloads(folder, ["code", "editing"], 4)
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
    assert find_workloads(path, ["b"], 2) == {"b": ["b 1", "b 2"]}
    write(path, [{"prompt": str(n)} for n in range(4)])
    assert find_workloads(path, [], 2) == {"prompts": ["0", "2"]}
    assert len(find_workloads(path, [], 9)["prompts"]) == 4


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
    with pytest.raises(PromptError, match=message):
        find_workloads(folder, names, 5 if names == ["mathematics"] else 2)


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


def usual_sides(models: Models) -> list[Side]:
    """Sides of the usual methods."""
    return workloads.sides_of(
        options.usual_specs(models.draft, models.heads), models, 6, [True]
    )


def cells_of(names: list[str], sizes: list[int], temperatures: list[float]) -> Any:
    """Make cells with a prompt for each request."""
    return [
        Cell(batch_size=b, temperature=t, workload=name, num_prompts=b)
        for name in names
        for b in sizes
        for t in temperatures
    ]


def test_sides_are_those_that_have_their_model() -> None:
    """Red when a side without its model is planned, or the suffix tree finds the
    answers of earlier cells."""
    sides = usual_sides(Models("t"))
    names = [side.name for side in sides]
    assert names == [
        "plain-eager",
        "plain-compiled",
        "ngram-6",
        "suffix_tree-32x28",
    ]
    assert sides[-1].engine["speculative_config"]["max_cached_tokens"] == 0
    names = [side.name for side in usual_sides(Models("t", "draft"))]
    assert names[2:4] == ["ngram-6", "draft_model-6"]
    assert names[-3:] == ["sd-3", "rsd_c-2.1.1", "rsd_s-2x3"]
    spec = {"method": "sd", "depth": 2}
    [*_, only] = workloads.sides_of([spec], Models("t", "d"), 6, [True])
    assert only.name == "sd-2"


def test_another_target_needs_a_draft_model_of_its_own() -> None:
    """Red when the shipped draft model is taken for another target in silence."""
    with pytest.raises(ValueError, match="--draft"):
        find_models("other", "")
    assert find_models("other", "none").draft is None
    assert find_models("other", "mine").draft == "mine"


def test_settings_without_workloads_are_as_before() -> None:
    """Red when runs stored before there were workloads would be refused."""
    cell = Cell(batch_size=1, temperature=0.0)
    side = plain_side("plain-eager", eager=True)
    job = Job(side=side, target="t", prompts=["a"], cells=[cell], max_tokens=4)
    assert set(cell.model_dump()) == {"batch_size", "temperature"}
    assert not {"workloads", "top_p"} & set(job.model_dump())
    full = Cell(batch_size=1, temperature=0.0, workload="chat", num_prompts=3)
    assert Cell.model_validate_json(full.model_dump_json()) == full
    with_workloads = job.model_copy(update={"workloads": {"chat": ["hello"]}})
    restored = Job.model_validate_json(with_workloads.model_dump_json())
    assert restored.workloads == {"chat": ["hello"]}


def result(cell: Cell, seconds: float) -> CellResult:
    """Make a result of 4 tokens."""
    answer = {"num_tokens": [4], "tpot_ms": [1.0], "token_ids": [[0] * 4]}
    return measured(cell, seconds, **answer)


def test_report_names_the_best_side_of_each_workload(tmp_path: Path) -> None:
    """Red when speed-ups land in another column or a slow method is advised."""
    plain = plain_side("plain-eager", eager=True)
    suffix = tree_side(SUFFIX, eager=True)
    cells = cells_of(["chat", "editing"], [1, 4], [0.0, 1.0])
    seconds = {"chat": 4.0, "editing": 1.0}
    rows = [summarise(plain, [result(cell, 4.0)]) for cell in cells]
    rows += [summarise(suffix, [result(c, seconds[c.workload])]) for c in cells]
    rows = with_speedups(rows)
    failed = {"sd-3": "no luck"}
    text = rendered(workloads.render, rows, tmp_path, failed=failed)
    assert "- chat: plain vLLM (the best other is suffix_tree-32x28 1.00×) at" in text
    assert "- editing: suffix_tree-32x28 4.00× at T = 0; suffix_tree-32x28 4" in text
    assert "| side | chat 1 | chat 4 | editing 1 | editing 4 |" in text
    assert f"| {SUFFIX_SIDE} | 1.00× | 1.00× | 4.00× | 4.00× |" in text
    assert "| fastest plain, tokens/s | 1.0 | 1.0 | 1.0 | 1.0 |" in text
    assert "- sd-3: no luck" in text


def test_greedy_only_sides_have_no_sampled_cells() -> None:
    """Red when stock ngram is sampled."""
    cells = cells_of(["chat"], [1], [0.0, 1.0])
    engines = {e.side.family: e for e in engines_of(usual_sides(Models("t")), cells, 1)}
    assert [cell.temperature for cell in engines["ngram"].cells] == [0.0]
    assert len(engines["suffix_tree"].cells) == 2


def test_the_command_plans_another_pair(folder: Path, tmp_path: Path) -> None:
    """Red when `workloads` gives a larger batch too few prompts."""
    common = ["workloads", "--workloads", "chat,editing", "--target", str(folder)]
    common += ["--batch-sizes", "1,2", "--num-prompts", "2", "--dry-run"]
    common += ["--out", str(tmp_path / "o")]
    data = ["--data", str(folder)]
    done = CliRunner().invoke(app, [*common, *data, "--draft", "none"])
    assert done.exit_code == 0, done.output
    assert f"ngram-6-compiled {SUFFIX_SIDE}-compiled\n" in done.output
    # of 2 workloads, 2 batch sizes, 2 temperatures; half of them for ngram
    assert "28 cells to measure in 4 engines" in done.output
    done = CliRunner().invoke(app, [*common, *data, "--draft", "none", "--waves", "9"])
    assert done.exit_code != 0
    assert "18 are asked for; lower --batch-sizes, --waves" in done.output
