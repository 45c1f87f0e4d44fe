"""Lyanna's experiment: heads without draft vocabulary, rows, report. No engine."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM
from typer.testing import CliRunner

from benchmarks.__main__ import app
from benchmarks.harness import report
from benchmarks.harness.plan import Plan, base_job, make_plan
from benchmarks.harness.rows import Entry
from benchmarks.lyanna import engine as in_engine
from benchmarks.lyanna import parts
from benchmarks.lyanna.coverage import coverage_of
from benchmarks.lyanna.experiment import evidence, labels_of
from benchmarks.lyanna.heads import full_twin, lyanna_of_all_tokens
from benchmarks.lyanna.rows import conditional, evidence_of
from tests.fast.stored_cells import keep, measured, reported, without_pictures
from tests.fast.test_eagle_benchmark import training
from tests.heads import llama, lyanna_head, write_head
from vllm_treespec.config import parse_spec_config
from vllm_treespec.heads import load_eagle_head, load_lyanna_head
from vllm_treespec.tools.sides import Acceptance, Cell

HOT = [1, 4, 5, 9, 20]
SIZES = [1, 2, 4, 8]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("lyanna")


@pytest.fixture(scope="module")
def target(folder: Path) -> str:
    """A tiny model of 32 tokens."""
    config = llama(hidden_size=64, num_key_value_heads=1)
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder / "target")
    return str(folder / "target")


@pytest.fixture(scope="module")
def heads(folder: Path, target: str) -> dict[str, str]:
    """Heads of 5 hot tokens, the first of the EAGLE head with the target's rows."""
    eagle = write_head(folder / "eagle", "eagle", num_hot_tokens=len(HOT))
    tensors = load_file(folder / "eagle" / "model.safetensors")
    output = load_file(Path(target) / "model.safetensors")["lm_head.weight"]
    tensors["d2t"] = torch.tensor(HOT) - torch.arange(len(HOT))
    tensors["t2d"] = torch.zeros(32, dtype=torch.bool)
    tensors["t2d"][HOT] = True
    tensors["lm_head.weight"] = output[HOT].to(tensors["lm_head.weight"].dtype)
    save_file(tensors, folder / "eagle" / "model.safetensors")
    lyanna = write_head(folder / "lyanna", "lyanna", num_hot_tokens=len(HOT))
    return {"eagle": eagle, "lyanna": lyanna}


@pytest.mark.parametrize("token_info", ["hot", "all"])
def test_token_info_of_hot_tokens_stays_the_same(token_info: str) -> None:
    """Red when the twin's norm, which is over more tokens, changes what info adds."""
    head = lyanna_head(num_hot_tokens=len(HOT), token_info=token_info, norm_eps=1e-14)
    head = head.double()
    assert head.hot_token_ids is not None
    head.hot_token_ids = torch.tensor(HOT)
    full = lyanna_of_all_tokens(head).double()
    embedding = torch.randn(32, 64, dtype=torch.float64)
    for one in (head, full):
        one.share(embedding, embedding)
    info, states = full.info_logits(torch.arange(32)), torch.randn(3, 64).double()
    wanted = head.info_logits(torch.tensor(HOT))
    torch.testing.assert_close(info[HOT][:, HOT], wanted, rtol=1e-12, atol=1e-12)
    cold = [token for token in range(32) if token not in HOT]
    assert not info[:, cold].any()
    assert wanted.abs().max() > 0.01
    torch.testing.assert_close(full.logits(states)[:, HOT], head.logits(states))


def test_twins_are_written_once_and_draft_all_tokens(
    heads: dict[str, str], target: str, tmp_path: Path
) -> None:
    """Red when a twin is no head, drafts hot tokens only, or other ones than before."""
    torch.manual_seed(1)
    embedding, states = torch.randn(32, 64), torch.randn(3, 64)
    output = load_file(Path(target) / "model.safetensors")["lm_head.weight"]
    for kind, load in (("eagle", load_eagle_head), ("lyanna", load_lyanna_head)):
        twin = Path(full_twin(kind, heads[kind], target, tmp_path))
        written = (twin / "config.json").stat().st_mtime_ns
        assert full_twin(kind, heads[kind], "no target", tmp_path) == str(twin)
        assert (twin / "config.json").stat().st_mtime_ns == written
        hot, full = load(heads[kind]), load(twin)
        assert (hot.config.draft_vocab_size, full.hot_token_ids) == (len(HOT), None)
        for one in (hot, full):
            one.float().share(embedding, output)
        ids = hot.hot_token_ids
        assert ids is not None
        logits = full.logits(states)
        assert logits.shape == (3, 32)
        torch.testing.assert_close(logits[:, ids], hot.logits(states))


def test_heads_that_have_no_twin_are_refused(
    heads: dict[str, str], target: str, tmp_path: Path
) -> None:
    """Red when a head is compared with one that differs in more than its tokens."""
    own = write_head(tmp_path / "own", "eagle", num_hot_tokens=len(HOT))
    every = write_head(tmp_path / "every", "lyanna")
    for kind, head in (("eagle", own), ("lyanna", every)):
        with pytest.raises(ValueError, match="name a head with a draft vocabulary"):
            full_twin(kind, head, target, tmp_path)


def plan_of(heads: dict[str, str], target: str, out: Path) -> tuple[list[Entry], Plan]:
    """All entries, and the plan of their engines."""
    folders = dict(heads)
    for kind, head in heads.items():
        folders[f"{kind}-full"] = full_twin(kind, head, target, out)
    sides = parts.all_sides("draft", folders, [heads["lyanna"]], False, 6)
    entries = parts.entries_of(sides, SIZES, num_prompts=4)
    engines = parts.engines_of(sides, entries, rounds=2)
    return entries, make_plan(base_job("target", ["a"] * 6, 8), engines, out, "x")


def test_one_engine_a_side_and_what_matters_first(
    heads: dict[str, str], target: str, tmp_path: Path
) -> None:
    """Red when a cell's tree is in no schedule, or figures lack a batch size."""
    _, mine = plan_of(heads, target, tmp_path)
    jobs = {job.side.name: job for round_, job in mine.todo() if round_ == 0}
    names = list(jobs)
    assert names[:3] == ["plain-compiled", "eagle-hot", "lyanna-hot"]
    assert names[-4:-1] == [
        "sd-3-compiled",
        "suffix_tree-32x28-compiled",
        "ngram-6-compiled",
    ]
    for name, job in jobs.items():
        if "model" in job.side.engine.get("speculative_config", {}):
            config = parse_spec_config(job.side.engine["speculative_config"])
            trees = [tree.config for tree in config.scheduled_trees()]
            for shape in [cell.tree for cell in job.cells if cell.tree]:
                assert any(t == t.with_shape(shape) for t in trees), name
    sizes = {n: {c.batch_size for c in job.cells} for n, job in jobs.items()}
    assert sizes["lyanna-full"] == sizes["eagle-full"] == {1, 2, 4}
    assert sizes["lyanna-merge"] == sizes["lyanna-replace"] == {1, 2}
    assert sizes["lyanna-default"] == sizes["plain-compiled"] == set(SIZES)
    rounds = {engine.side.name: engine.rounds for engine in mine.engines}
    assert (rounds["table1-lyanna"], rounds["lyanna-hot"]) == (1, 2)
    [cell] = jobs["table1-lyanna"].cells
    assert (cell.num_prompts, cell.tree) == (None, parts.SIXTEEN)
    assert {c.num_prompts for c in jobs["plain-compiled"].cells} == {4, 8}


def finish(mine: Plan, round_: int) -> None:
    """Store all cells of a round; Lyanna takes half of EAGLE's time."""
    details: dict[str, Any]
    for engine in mine.engines:
        for cell in engine.cells:
            details = {}
            if cell.measure == parts.WITH_LEFTOVERS:
                details = {"leftover_nodes": 1.5, "leftover_accepted": 0.125}
            if cell.measure == parts.OUTPUT_LAYER:
                names = ("once_ms", "softmax_once_ms", "softmax_rows_ms")
                details = {"rows_ms": 4.0, **dict.fromkeys(names, 1.0)}
            share = 0.5 if "lyanna" in engine.side.name else 1.0
            stages = dict.fromkeys(["draft", "draft_forward", "pairs", "levels"], share)
            result = measured(
                cell,
                share * (1 + round_),
                num_tokens=[50],
                tpot_ms=[1.0],
                acceptance=Acceptance(trees=100, nodes=600, at_least=[80, 40, 10]),
                steps=100,
                stage_seconds=stages,
                details=details,
            )
            keep(mine, engine.side, result, round_)


def test_report_is_made_from_the_results_alone(
    heads: dict[str, str], target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Red when tables need more than results.json, or a part is lost."""
    without_pictures(monkeypatch)
    entries, mine = plan_of(heads, target, tmp_path)
    finish(mine, 0)
    finish(mine, 1)
    finished = mine.finished()
    labels = {"labels": {"table1-lyanna": "full"}, "coverage": [], "curves": []}
    origin = {"command": "python -m benchmarks lyanna", "commit": "abc"}
    content = report.header(origin, {}, finished)
    report.write_json(tmp_path, content | evidence(entries, labels, finished))
    text = reported(tmp_path)
    assert "## Figures 8 to 11: T = 0, batch 8" in text
    numbers = "| 2.30 ± 0.06 | 75.0 (50.0–100.0) | 2.00× | 6.0 | 0.80 0.40 0.10 | 2 |"
    assert f"| 2 | lyanna-merge-16 | 16 {numbers} 1.50 | 0.125 |" in text
    assert "| lyanna-hot-16 | 16 " in text
    assert "| full (lyanna) | 80.0% ± 4.0% | 50.0% ± 5.6% | 25.0% ± 6.8% |" in text
    for of, at in (("draft", 5), ("draft_forward", 3)):
        ratio = "Lyanna / EAGLE, all tokens"
        assert f"| {of} | {ratio} | {at} | 0.500 | 0.500 | 0.500 |" in text
    assert "| tokens/s | Lyanna / plain | 8 | 2.000 | 2.000 | 2.000 |" in text
    assert "| lyanna-full | 1.000 | 4.000 | 0.250 | 1.000 | 1.000 |" in text
    assert "| eagle-full | 5 | 10.00 | 10.00 | 10.00 | 10.00 |" in text


def test_ratios_are_of_the_same_round(
    heads: dict[str, str], target: str, tmp_path: Path
) -> None:
    """Red when a slow round of one side is divided by a fast one of another."""
    entries, mine = plan_of(heads, target, tmp_path)
    finish(mine, 0)
    finish(mine, 1)
    late = [s for s in mine.finished() if s.round or s.side.name != "eagle-hot"]
    found = evidence_of(entries, late)
    [row] = [
        row
        for row in found["ratios"]
        if (row["of"], row["ratio"], row["at"])
        == ("tokens/s", "Lyanna / EAGLE, hot tokens", 1)
    ]
    assert (row["median"], row["min"]) == (2.0, 2.0)
    assert evidence_of(entries, [])["table1"] == []


def test_acceptance_is_that_of_trees_that_came_so_far() -> None:
    """Red when a step's share is over all trees, as depths in other tables are."""
    found = conditional(Acceptance(trees=200, nodes=900, at_least=[100, 20]))
    assert [step["share"] for step in found["steps"]] == [0.5, 0.2]
    assert found["steps"][1]["error"] == pytest.approx(0.04)
    assert found["length"] == pytest.approx(1.6)


def test_coverage_counts_answers_only(tmp_path: Path, target: str) -> None:
    """Red when prompts are counted, or shares are of the tokens that occur."""
    rows = [([7] * 9 + [3, 3, 3, 4], 9), ([3, 3, 5, 6, 6], 2)]
    lines = [json.dumps({"token_ids": ids, "prompt_len": n}) for ids, n in rows]
    text = tmp_path / "text.jsonl"
    text.write_text("\n".join(lines) + "\n")
    found = coverage_of(text, target)
    table = [(point["tokens"], point["occurrences"]) for point in found[:5]]
    assert table == [
        (1, pytest.approx(3 / 7)),
        (2, pytest.approx(5 / 7)),
        (5, 1.0),
        (8, 1.0),
        (16, 1.0),
    ]
    with pytest.raises(ValueError, match="--text: there is no file"):
        coverage_of(tmp_path / "none", target)


def test_trained_heads_make_table_and_curves(tmp_path: Path) -> None:
    """Red when a history is lost, or heads without one end the experiment."""
    trained, out = tmp_path / "trained", tmp_path / "out"
    form = {"method": "lyanna", "token_info_rank": 64, "first_token": True}
    accuracies = {f"eval_accuracy_{n}": 0.1 * n for n in range(1, 6)}
    for name in ("hot", "all", "older"):
        config = {**form, "context": True, "token_info": name.replace("older", "hot")}
        training(trained / name, [0.5, 0.4], config=config, three=False)
        file = trained / name / "training.json"
        record = json.loads(file.read_text())
        record["head"] = {key: config[key] for key in list(config)[1:]}
        if name != "older":
            record["evaluations"] = [{"step": 20, "eval_kl": 2.0, **accuracies}]
        file.write_text(json.dumps(record))
    training(trained / "eagle", [0.5], three=True)
    command = ["lyanna", "--target", "target", "--draft", "none", "--sides", "none"]
    command += ["--trainings", str(trained), "--out", str(out)]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.output
    text = (out / "results.md").read_text()
    assert "| step | token info of all tokens (all) | full (hot) |" in text
    assert "| 20 | 20.00% | 20.00% |" in text
    assert (out / "figure5.png").stat().st_size > 0
    assert not (out / "speed.png").exists()


def test_variants_say_what_they_leave_out(
    heads: dict[str, str], tmp_path: Path
) -> None:
    """Red when table 1 mistakes one head for another."""
    options: dict[str, dict[str, Any]] = {
        "full": {},
        "without token info": {"token_info_rank": 0},
        "without first token": {"first_token": False},
        "without context": {"context": False},
        "token info of all tokens": {"token_info": "all", "num_hot_tokens": 5},
    }
    folders = {
        write_head(tmp_path / str(n), "lyanna", **changed): label
        for n, (label, changed) in enumerate(options.items())
    }
    assert labels_of(list(folders)) == folders
    first = next(iter(folders))
    same = write_head(tmp_path / "other" / Path(first).name, "lyanna")
    with pytest.raises(ValueError, match="two folders have the name"):
        labels_of([first, same])
    with pytest.raises(ValueError, match="holds no lyanna head"):
        labels_of([heads["eagle"]])


def test_output_layer_is_timed_with_all_rows() -> None:
    """Red when one by one is not one by one."""
    seen: list[int] = []

    def logits(states: torch.Tensor) -> torch.Tensor:
        seen.append(len(states))
        return states

    source = SimpleNamespace(
        head=SimpleNamespace(logits=logits),
        config=SimpleNamespace(hidden_size=4),
        dtype=torch.bfloat16,
        device=torch.device("cpu"),
    )
    runner = SimpleNamespace(drafter=SimpleNamespace(paged=[source]))
    found = in_engine.time_output(SimpleNamespace(model_runner=runner))
    assert seen == [5] + [5, 1, 1, 1, 1, 1] * in_engine.REPEATS
    assert len(found) == 4
    assert min(found.values()) > 0


def test_leftovers_are_counted_a_tree() -> None:
    """Red when counts of several rounds cannot be compared."""
    totals = {"trees": 8, "leftover_nodes": 12, "leftover_accepted": 2, "steps": 9}
    cell = Cell(batch_size=1, temperature=0.0)
    engine: Any = SimpleNamespace(
        time_answers=measured,
        llm=SimpleNamespace(collective_rpc=lambda name: [totals]),
    )
    found = in_engine.with_leftovers(engine, cell).details
    assert found == {"leftover_nodes": 1.5, "leftover_accepted": 0.25}
